"""``run.html``: figures as in ``metrics.jsonl``, at a bounded cost, and no run fails for it."""

import errno
import json
import math
import os
import re
import time
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tests.loading.forecast.test_page import Parsed
from zerostart.training.loop import run_page
from zerostart.training.loop.output_directory import PAGE
from zerostart.training.loop.progress import Display, Metrics
from zerostart.training.loop.run_page import POINTS, About, Course, RunPage

COUNTED = ("items", "items/s")
HOSTILE = 'a <script>alert(1)</script> "quoted" &amp; \u202eprompt'
ABOUT = About(HOSTILE, {"model": HOSTILE}, [HOSTILE, "the sea"])


def line(step: int, **more: float | None) -> dict[str, float | None]:
    common = {"loss": 10 / step, "gradient_norm": 1.0, "learning_rate": 1e-3, "items": 8, "seconds": 2.0}
    return {"step": step, **common, "peak_bytes": 10**9, **more}


def drawings(path: Path) -> list[list[str]]:
    """The lines of each chart, read as XML: what is not a child of the picture itself is not drawn."""
    found = re.findall(r"<svg.*?</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
    return [
        [one.get("d", "") for one in ElementTree.fromstring(svg) if one.get("class", "").startswith("line")]
        for svg in found
    ]


def shown(directory: Path) -> Parsed:
    return Parsed((directory / PAGE).read_text(encoding="utf-8"))


def test_a_run_from_its_begin_over_a_resume_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    def go(first: int, last: int, before: int) -> Parsed:
        with Display(4, file, 1, COUNTED, ABOUT, active=True) as display:
            display.begin(before)
            running = shown(tmp_path)
            display.start()
            for step in range(first, last + 1):
                display.step(Metrics(step, math.nan if step == 2 else 10 / step, None, 1e-3, 8, 10**9))
            display.evaluation(last, 0.5)
        return running

    running = go(1, 3, 0)
    assert "running, step 0 of 4" in "".join(running.text)
    assert any(found.get("http-equiv") == "refresh" for _, found in running.elements)
    assert "stopped after step 3" in "".join(shown(tmp_path).text)
    before = "".join(go(3, 4, 2).text)  # the third step is done again
    assert "running, step 2 of 4" in before
    page = shown(tmp_path)
    assert "finished" in "".join(page.text)
    assert "not finite: 2" in "".join(page.text)
    assert not any(found.get("http-equiv") == "refresh" for _, found in page.elements)
    told = [json.loads(one) for one in file.read_text().splitlines()]
    losses = {one["step"]: one["loss"] for one in told if "loss" in one}
    rates = {one["step"]: one["items"] / one["seconds"] for one in told if "loss" in one}
    held_out = {one["step"]: one["held_out_loss"] for one in told if "held_out_loss" in one}
    assert page.figures("steps") == [
        [step, "–" if losses[step] is None else losses[step], held_out.get(step, "–"), 1e-3, rates[step], 1e9]
        for step in (1, 2, 3, 4)
    ]
    drawn = drawings(tmp_path / PAGE)
    assert len(drawn) == 4
    # Losses of the steps 1, 3 and 4 from the top down, and one point of what is held out.
    places = re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn[0][0])
    assert [float(x) for x, _ in places] == pytest.approx([0, 2000 / 3, 1000], abs=0.1)
    assert [float(y) for _, y in places] == sorted(float(y) for _, y in places)
    assert len(set(re.findall(r"[ML]([\d.]+ [\d.]+)", drawn[0][1]))) == 1
    assert [row[1] for row in page.figures("latest")] == [losses[4], 0.5, 1e-3, rates[4], 1e9]


def test_figures_that_somebody_wrote_by_hand_end_no_run(tmp_path: Path) -> None:
    page = RunPage(tmp_path, ABOUT, 4, COUNTED)
    assert page.begin([line(1), {**line(2), "step": "2.5"}, line(3, loss=10**400)]) is None  # type: ignore[dict-item]
    assert page.course.latest["loss"] == 10.0


def test_other_ranks_write_none(tmp_path: Path) -> None:
    with Display(1, tmp_path / "metrics.jsonl", 1, COUNTED, ABOUT, active=False) as display:
        display.begin(0)
        display.step(Metrics(1, 1.0, 1.0, 1e-3, 8, 10**9))
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_told(tmp_path: Path) -> None:
    error = ValueError(HOSTILE)
    display = Display(1, tmp_path / "metrics.jsonl", 1, COUNTED, ABOUT, active=True)
    display.begin(0)
    display.__exit__(ValueError, error, None)
    assert "ended by ValueError: a <script>alert(1)</script>" in "".join(shown(tmp_path).text)


def test_texts_and_files_from_outside_stay_what_they_are(tmp_path: Path) -> None:
    """Prompts, facts, and names of samples with what a link may not have: these are shown where they lie."""
    folder = tmp_path / "samples" / "step-00000002"
    folder.mkdir(parents=True)
    for name in ("0-a-script.png", "1-the-sea-%41#?.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    (folder / '2-"><script>.mp4').touch()
    (folder / "notes.png").touch()  # not ours
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    page = RunPage(tmp_path, ABOUT, 4, COUNTED)
    assert page.begin([line(1), line(2, loss="high", unheard=[1])]) is None  # type: ignore[arg-type]
    found = shown(tmp_path)
    shown_files = [str(one["src"]) for tag, one in found.elements if tag in ("img", "video")]
    assert len(shown_files) == 3
    assert all((tmp_path / unquote(name)).is_file() for name in shown_files)
    assert not any(mark in name for name in shown_files for mark in '"<>#?')
    assert [one["alt"] for tag, one in found.elements if tag == "img"][1] == "the sea"
    assert "checkpoints/step-00000002" in [one.get("href") for tag, one in found.elements if tag == "a"]
    assert not any(key.startswith("on") for _, one in found.elements for key in one)
    assert [tag for tag, _ in found.elements].count("script") == 1, "its own"
    assert "\u202e" not in (tmp_path / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("steps", [1, POINTS, 2 * POINTS, 12_345])
def test_lines_of_any_number_of_steps(steps: int) -> None:
    """In bounded room, and each range with the least, the mean and the most of its steps, as NumPy says."""
    losses = np.random.default_rng(0).lognormal(size=steps)
    course = Course("items")
    for step, loss in enumerate(losses.tolist(), 1):
        course.add(line(step, loss=loss))
    points = course.points("loss")
    assert min(steps, POINTS) <= len(points) <= 2 * POINTS
    assert points[-1][0] == steps
    begin = 0
    for last, least, mean, most in points:
        some = losses[begin : int(last)]
        assert (least, mean, most) == pytest.approx((some.min(), some.mean(), some.max()))
        begin = int(last)


def test_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a hundredth of the time of a run of short steps, and a page of less than half a megabyte."""
    monkeypatch.setattr(run_page, "EVERY", 0.0)  # as often as its share of the time allows
    page = RunPage(tmp_path, ABOUT, 10**6, COUNTED)
    for step in range(1, 20_000):
        page.course.add(line(step, loss=float(np.sin(step)) + 2))
    begun, step = time.monotonic(), 20_000
    page.seconds = 0.0
    while time.monotonic() < begun + 3:
        page.add(line(step := step + 1))
        time.sleep(0.001)
    assert 0 < page.seconds < 0.02 * (time.monotonic() - begun) + 0.1
    assert (tmp_path / PAGE).stat().st_size < 500_000


def test_a_page_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: the run goes on, and the page comes back with the room."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    page = RunPage(tmp_path, ABOUT, 4, COUNTED)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert "No space left on device" in str(page.begin([line(1)]))
        assert page.write() is None
        assert list(tmp_path.iterdir()) == []
    assert page.write() is None
    assert shown(tmp_path).figures("latest")
