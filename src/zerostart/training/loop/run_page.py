"""``run.html``: the figures of a run with its checkpoints and samples, to look at while it runs.

All of it comes from what the run writes anyway: the lines of ``metrics.jsonl``, and what lies in its folder.
The page is written anew every `EVERY` seconds, and the less often the longer that takes: `SHARE` of the time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

from rich.filesize import decimal

from zerostart.checkpoint.write.folders import write_whole
from zerostart.loading.drawing import (
    Line,
    Markup,
    chart,
    folded,
    joined,
    number,
    page,
    page_script,
    spans,
    table,
    tag,
)
from zerostart.state.resuming.training_state import MARKER
from zerostart.training.loop.output_directory import FOLDER, PAGE
from zerostart.training.loop.terminal import duration
from zerostart.training.samples.sampler import FOLDER as SAMPLES
from zerostart.training.samples.sampler import drawn_files

#: Seconds from one page to the next, the most of all time that writing them may take, and seconds after which
#: a browser loads it again.
EVERY, SHARE, REFRESH = 10.0, 0.005, 20
#: Points of a line and rows of a table at most, and checkpoints, steps of samples and samples of a step.
POINTS, ROWS, CHECKPOINTS, STEPS, SAMPLES_OF_STEP = 400, 40, 50, 5, 12
#: Of a line of ``metrics.jsonl`` by the words for it; what a step has seen is told as a rate.
_FIGURES = {
    "loss": "training loss",
    "held_out_loss": "held-out loss",
    "gradient_norm": "gradient norm, before clipping",
    "learning_rate": "learning rate",
    "rate": "throughput",
    "peak_bytes": "memory of rank 0 at its highest",
}


@dataclass
class _Range:
    """The figures of the steps ``first`` to ``last``: by name the least, sum, most, how many."""

    first: int
    last: int
    values: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)

    def add(self, other: _Range) -> None:
        """Take in the steps that come after."""
        self.last = other.last
        for name, (least, total, most, many) in other.values.items():
            was = self.values.get(name, (math.inf, 0.0, -math.inf, 0))
            self.values[name] = (min(was[0], least), was[1] + total, max(was[2], most), was[3] + many)

    @property
    def steps(self) -> Markup:
        """Which steps, as a number where it is one."""
        if self.first == self.last:
            return number(self.last)
        return joined(f"{self.first:,} to {self.last:,}")

    def mean(self, name: str) -> float | None:
        """The mean, None where there is no such figure."""
        if name not in self.values:
            return None
        _, total, _, many = self.values[name]
        return total / many


class Course:
    """The figures of a run, of any number of steps in the room of `POINTS` to twice as many."""

    def __init__(self, counted: str) -> None:
        """``counted`` is the key of what a step has seen."""
        self._counted = counted
        # Steps of a range: doubled whenever there are twice as many ranges as are drawn.
        self._width = 1
        self.ranges: list[_Range] = []
        self.latest: dict[str, float] = {}
        self.without_loss: list[int] = []

    def add(self, values: Mapping[str, float | None]) -> None:
        """One line of ``metrics.jsonl``; steps come in their order."""
        step = int(values["step"] or 0)
        # A file that was written to by hand may have anything.
        known = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
        figures = {name: value for name, value in known.items() if name in _FIGURES}
        if known.get("seconds") and self._counted in known:
            figures["rate"] = known[self._counted] / known["seconds"]
        if "loss" in values and "loss" not in figures and len(self.without_loss) < POINTS:
            self.without_loss.append(step)
        self.latest |= figures
        one = _Range(step, step, {name: (value, value, value, 1) for name, value in figures.items()})
        # Steps of one range; an evaluation, too, which has a line of its own for the step that it follows.
        if self.ranges and self.ranges[-1].last // self._width == step // self._width:
            self.ranges[-1].add(one)
        else:
            self.ranges.append(one)
        if len(self.ranges) >= 2 * POINTS:
            self._width *= 2
            self.ranges = list(_merged(self.ranges, self._width))

    def points(self, name: str) -> list[tuple[float, float, float, float]]:
        """Of each range that has the figure: its last step, and the least, the mean and the most there."""
        return [
            (found.last, found.values[name][0], found.mean(name) or 0.0, found.values[name][2])
            for found in self.ranges
            if name in found.values
        ]


def _merged(ranges: Iterable[_Range], width: int) -> Iterator[_Range]:
    made: _Range | None = None
    for one in ranges:
        if made is not None and made.last // width == one.last // width:
            made.add(one)
            continue
        if made is not None:
            yield made
        made = one
    if made is not None:
        yield made


@dataclass(frozen=True)
class About:
    """What a page says of its run: a ``title``, ``facts`` by name, and the texts of samples by number."""

    title: str
    facts: Mapping[str, str]
    texts: Sequence[str] = ()


class RunPage:
    """The page in a run's ``directory``; it fails no run: what cannot be written is told once."""

    def __init__(self, directory: Path, about: About, steps: int, counted: tuple[str, str]) -> None:
        self._directory = directory
        self._about = about
        self._steps = steps
        self._counted = counted
        self.course = Course(counted[0])
        self._begun = time.time()
        # On the clock of ``monotonic``: when the page is written next.
        self._due = 0.0
        self._told = False
        # All that writing pages has taken.
        self.seconds = 0.0

    @property
    def path(self) -> Path:
        """Where the page is."""
        return self._directory / PAGE

    def begin(self, lines: Iterable[Mapping[str, float | None]]) -> str | None:
        """Begin with what an earlier part of the run has written down; as ``write``."""
        self.course = Course(self._counted[0])
        for values in lines:
            with contextlib.suppress(ValueError, OverflowError):  # a step or a figure that is no such number
                self.course.add(values)
        return self.write()

    def add(self, values: Mapping[str, float | None]) -> str | None:
        """One more line; the page is written where it is due. As ``write``."""
        self.course.add(values)
        return self.write() if time.monotonic() >= self._due else None

    def write(self, ended: str | None = None) -> str | None:
        """Write the page, of a run that has ``ended`` so; gives what there is to say of a failure, once."""
        start = time.perf_counter()
        told = None
        try:
            # Whole or not at all, since a browser may read it at any moment; it need not survive a crash.
            part = self._directory / f".{PAGE}.part"
            write_whole(self._directory / PAGE, self.text(ended).encode(), part, durable=False)
        except Exception as error:  # a page to look at is worth no run
            with contextlib.suppress(OSError):
                (self._directory / f".{PAGE}.part").unlink()
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            told = f"{self._directory / PAGE} cannot be written: {reason}; the run goes on, and tries again"
            told = None if self._told else told
            self._told = True
        took = time.perf_counter() - start
        self.seconds += took
        # A page that took long is written the less often, so that it stays ``SHARE`` of the run's time.
        self._due = time.monotonic() + max(EVERY, took / SHARE)
        return told

    def text(self, ended: str | None = None) -> str:
        """The whole page."""
        about, step = self._about, max((found.last for found in self.course.ranges), default=0)
        now = time.time()
        state = ended or f"running, step {step:,} of {self._steps:,}"
        written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        return page(
            f"{about.title}: {state}",
            tag("h1", about.title),
            tag("p", tag("strong", state), f", {duration(now - self._begun)} since it was started"),
            tag("progress", max=max(1, self._steps), value=step, aria_label="steps done"),
            tag("p", f"written {written}", data_written=None if ended else round(now), class_="note"),
            *self._figures(),
            *self._checkpoints(),
            *self._samples(),
            *self._facts(),
            script=page_script(),
            refresh=None if ended else REFRESH,
        )

    def _figures(self) -> Iterator[Markup]:
        course = self.course
        yield tag("h2", "Figures")
        if not course.latest:
            yield tag("p", "No step has been done yet.")
            return
        shown = [name for name in _FIGURES if name in course.latest]
        latest = [(_FIGURES[name], self._number(name, course.latest[name])) for name in shown]
        yield table("The latest", ("figure", "value"), latest, id="latest")
        if lost := course.without_loss:
            words = f"Steps without a loss, or with one that is not finite: {spans(lost)}"
            yield tag("p", words, class_="bad")
        yield tag("div", *self._charts(), class_="charts")
        rows = [
            (found.steps, *(self._number(name, found.mean(name)) for name in shown))
            for found in _merged_to(course.ranges, ROWS)
        ]
        headings = ("steps", *(_FIGURES[name] for name in shown))
        yield folded("as a table", table("Means of steps", headings, rows, id="steps"))

    def _charts(self) -> Iterator[Markup]:
        course = self.course
        marks = {float(step): f"checkpoint after step {step:,}" for step, _ in self._saved()}
        span = (min(course.ranges[0].first, 1), max(course.ranges[-1].last, 2))
        for title, *names in (
            ("loss", "loss", "held_out_loss"),
            ("gradient norm", "gradient_norm"),
            ("learning rate", "learning_rate"),
            ("throughput", "rate"),
            ("memory of rank 0", "peak_bytes"),
        ):
            lines = [
                Line(_FIGURES[name], 9 if name == "held_out_loss" else 0, points)
                for name in names
                if (points := course.points(name))
            ]
            if lines:
                marked = marks if "loss" in names else None
                spread = names[0] in ("loss", "gradient_norm")
                yield chart(title, lines, span, marked, partial(self._shown, names[0]), spread)

    def _number(self, name: str, value: float | None) -> Markup:
        return Markup("–") if value is None else number(value, self._shown(name, value))

    def _shown(self, name: str, value: float) -> str:
        if name == "peak_bytes":
            return decimal(round(value))
        if name == "rate":
            return f"{value:,.1f} {self._counted[1]}"
        return f"{value:.3e}" if name == "learning_rate" else f"{value:.4f}"

    def _saved(self) -> list[tuple[int, Path]]:
        """The checkpoints that are there, by their steps."""
        found = []
        with contextlib.suppress(OSError):
            for path in (self._directory / FOLDER).glob("step-*"):
                word = path.name.removeprefix("step-")
                if word.isdigit() and (path / MARKER).is_file():
                    found.append((int(word), path))
        return sorted(found)

    def _checkpoints(self) -> Iterator[Markup]:
        found = self._saved()
        if not found:
            return
        yield tag("h2", "Checkpoints")
        links = [
            tag("a", f"after step {step:,}", href=self._link(path)) for step, path in found[-CHECKPOINTS:]
        ]
        yield tag("ul", *(tag("li", link) for link in links))

    def _link(self, path: Path) -> str:
        return quote(path.relative_to(self._directory).as_posix())

    def _samples(self) -> Iterator[Markup]:
        folders = sorted(path for path in (self._directory / SAMPLES).glob("step-*") if path.is_dir())
        if not folders:
            return
        yield tag("h2", "Samples")
        # The first beside the last ones: what the model drew before it learnt anything.
        for folder in reversed([*folders[:1], *folders[1:][-STEPS + 1 :]]):
            files = drawn_files(folder)
            word = folder.name.removeprefix("step-")
            many = f", {SAMPLES_OF_STEP} of {len(files)}" if len(files) > SAMPLES_OF_STEP else ""
            yield tag("h3", f"after step {int(word) if word.isdigit() else word}{many}")
            yield tag("div", *map(self._sample, files[:SAMPLES_OF_STEP]), class_="samples")
        if len(folders) > STEPS:
            yield tag("p", f"and of {len(folders) - STEPS} more steps, in {SAMPLES}", class_="note")

    def _sample(self, file: Path) -> Markup:
        place = int(file.name.partition("-")[0].partition(".")[0])
        text = self._about.texts[place] if place < len(self._about.texts) else file.stem
        link = self._link(file)
        if file.suffix == ".png":
            shown = tag("img", src=link, alt=text, loading="lazy")
        else:
            given = {"controls": True, "loop": True, "muted": True, "preload": "metadata"}
            shown = tag("video", src=link, aria_label=text, **given)
        return tag("figure", shown, tag("figcaption", text))

    def _facts(self) -> Iterator[Markup]:
        yield tag("h2", "The run")
        facts = list(self._about.facts.items())
        yield table("What is trained, and how", ("key", "value"), facts, id="facts")
        yield tag(
            "p", joined("All figures: ", tag("a", "metrics.jsonl", href="metrics.jsonl")), class_="note"
        )


def _merged_to(ranges: Sequence[_Range], rows: int) -> Iterator[_Range]:
    """As many ``rows`` at most, of as many ranges each."""
    by = -(-len(ranges) // rows)
    for start in range(0, len(ranges), by):
        made = _Range(ranges[start].first, ranges[start].last)
        for one in ranges[start : start + by]:
            made.add(one)
        yield made
