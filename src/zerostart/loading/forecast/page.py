"""A forecast as a page: memory against its limits, who reads what, what is exchanged, what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import numpy as np
from rich.filesize import decimal

from zerostart.engines import titled
from zerostart.loading.drawing import (
    Ends,
    Grid,
    Markup,
    folded,
    heat,
    joined,
    legend,
    number,
    page,
    page_script,
    size,
    spans,
    stacked,
    table,
    tag,
)
from zerostart.loading.forecast.result import Fit, Memory, RankForecast, WorldPlan

#: Kinds of ranks that get bars of their own, rows of a table, names of a list, and cells of a map: what
#: bounds the size of a page. A cell is some 30 bytes.
MOST_KINDS, MOST_LINES, MOST_NAMES, MOST_CELLS = 12, 2048, 100, 1 << 16
TITLES = {"load": "load", "initialize": "initialize", "step": "first step"}
_MEANINGS = (
    "load: the model is built without memory, weights are read, converted and put into their shards; "
    "initialize: the engine and the optimizer are made; first step: forward, backward and update. Of each "
    "phase the highest moment is shown. Activations depend on the batch and are not counted."
)
#: Components by colour, in the order in which they are stacked.
COMPONENTS = {
    "parameters": 0,
    "buffers": 1,
    "secondary partitions": 2,
    "staging": 3,
    "master weights": 4,
    "gradients": 5,
    "optimizer state": 6,
    "gathered parameters": 7,
    "incoming gradient": 8,
    "buckets": 9,
    "scratch": 10,
}

_SHARERS = (
    "Where parameters are in shards, ranks that share experts or tensors hold as much as before: all ranks "
    "divide every parameter in either case. They gather less of a module at a time, which lowers the first "
    "step only while that module is the largest one, and by little beside buckets that are larger."
)


def page_of(made: WorldPlan, source: str) -> str:
    """The whole page of the plan of ``source``."""
    many = "1 rank" if made.world_size == 1 else f"{made.world_size:,} ranks"
    title = f"{PurePath(source).name or source}: {titled(made.engine, made.zero_stage)}, {many}"
    facts = joined(
        size(made.checkpoint_bytes),
        ", ",
        number(made.parameters),
        " elements, largest tensor ",
        size(made.largest_tensor_bytes),
        f"; {made.optimizer}; the engine is {made.engine_reason}; planned in {made.planning_seconds:.2f} s",
    )
    return page(
        title,
        tag("h1", title),
        tag("p", source, class_="note"),
        tag("p", facts),
        *_verdicts(made),
        *_alternatives(made),
        *_memory(made),
        *_reading(made),
        *_exchange(made),
        *_names(made),
        script=page_script(),
    )


def _verdicts(made: WorldPlan) -> Iterator[Markup]:
    if not made.fits:
        yield tag("p", "No limit of memory is known: give --device-memory and --host-memory.", class_="note")
    for fit in made.fits:
        words = "✓ fits" if fit.fits else "✗ does not fit"
        whose = f" of {fit.ranks} ranks" if fit.ranks > 1 else ""
        told = (f": {fit.where} memory{whose}, ", size(fit.needed), f" ({TITLES[fit.phase]}) of ")
        free = " that this machine has free" if fit.found else ""
        verdict = tag("span", words, class_="good" if fit.fits else "bad")
        yield tag("p", verdict, *told, size(fit.limit), free)


def _alternatives(made: WorldPlan) -> Iterator[Markup]:
    if made.fit is not False:
        return
    yield tag("h2", "What to change")
    for words in made.advice:
        yield tag("p", "To make it fit: ", tag("strong", words))
    limits = {fit.where: fit.limit for fit in made.fits}
    headings = ["change", *(f"{where}, of {decimal(limit)}" for where, limit in limits.items()), "fits"]
    rows = []
    for other in made.alternatives:
        fits = {fit.where: fit for fit in other.fits}
        rows.append((other.change, *(_share(fits.get(where)) for where in limits), "✓" if other.fit else "✗"))
    if rows:
        yield table("Each change with its own forecast", headings, rows, id="alternatives")
    if any("_parallel=" in other.change for other in made.alternatives):
        yield tag("p", _SHARERS, class_="note")


def _share(fit: Fit | None) -> Markup:
    if fit is None:
        return Markup("–")
    return joined(size(fit.needed), f" ({fit.needed / fit.limit:.0%})")


def _memory(made: WorldPlan) -> Iterator[Markup]:
    classes = sorted(made.classes, key=lambda pair: -_highest(pair[0]))
    if not classes or not classes[0][0].memory:
        return
    yield tag("h2", "Memory of each rank")
    yield tag("p", _MEANINGS, class_="note")
    used = dict.fromkeys(n for rank, _ in classes for m in rank.memory.values() for n in (*m.device, *m.host))
    yield legend([name for name in COMPONENTS if name in used], COMPONENTS)
    limits = {fit.where: fit.limit // fit.ranks for fit in made.fits}
    for shown, alike in classes[:MOST_KINDS]:
        numbers = spans(rank.rank for rank in alike)
        yield tag("h3", f"rank {numbers}" if len(alike) == 1 else f"ranks {numbers}")
        for where in ("device", "host"):
            phases = {phase: _parts(memory, where) for phase, memory in shown.memory.items()}
            if any(phases.values()):
                yield from _bars(where, phases, limits.get(where), made.accelerator)
    if len(classes) > MOST_KINDS:
        yield tag("p", f"and {len(classes) - MOST_KINDS} more kinds of ranks, each of which holds less")


def _parts(memory: Memory, where: str) -> Mapping[str, int]:
    return memory.device if where == "device" else memory.host


def _highest(rank: RankForecast) -> int:
    return max((m.host_bytes + m.device_bytes for m in rank.memory.values()), default=0)


def _bars(
    where: str, phases: Mapping[str, Mapping[str, int]], limit: int | None, accelerator: bool
) -> Iterator[Markup]:
    """One kind of memory of a kind of ranks: a bar for each phase, and the table of it."""
    highest = max(sum(parts.values()) for parts in phases.values())
    # A limit far off would leave nothing to see of the bars.
    near = limit is not None and limit <= 4 * highest
    scale = 1.02 * max(highest, limit or 0) if near else highest
    rows: list[Markup] = []
    for phase, parts in phases.items():
        over = limit is not None and sum(parts.values()) > limit
        rows += [
            tag("span", TITLES[phase]),
            stacked(parts, scale, COMPONENTS, limit if near else None),
            tag("span", size(sum(parts.values())), class_="bad" if over else None),
        ]
    told = "" if accelerator or where == "device" else " (the device is the CPU)"
    against = "" if limit is None else f", limit {decimal(limit)} a rank"
    yield tag("p", f"{where} memory{told}{against}", class_="note")
    yield tag("div", *rows, class_="bars")
    names = [name for name in COMPONENTS if any(name in parts for parts in phases.values())]
    lines: list[Sequence[object]] = [
        (name, *(size(parts.get(name, 0)) for parts in phases.values())) for name in names
    ]
    lines.append(("together", *(size(sum(parts.values())) for parts in phases.values())))
    headings = [where, *(TITLES[phase] for phase in phases)]
    yield folded(
        "as a table", table(f"{where} memory by what takes it", headings, lines, class_="components")
    )


def _reading(made: WorldPlan) -> Iterator[Markup]:
    yield tag("h2", "Reading")
    rates = ", ".join(f"{n} {decimal(int(rate))}/s" for n, rate in made.rates.items() if rate is not None)
    read = sum(rank.read_bytes for rank in made.ranks)
    takes = f"{made.read_seconds:.3g} s" if made.read_seconds >= 1e-3 else "less than 1 ms"
    words = f"; the slowest rank reads for {takes}" + (f" at {rates}" if rates else "")
    yield tag("p", "All ranks together read ", size(read), words)
    files = made.files
    if any(file.read_ops for file in files):
        yield _map_of_reads(made)
        # Names differ in their ends: the folder that they share is told above.
        rows = [
            (_short(f.name), size(f.nbytes), size(f.read_bytes), number(f.read_ops), number(f.ranks))
            for f in files[:MOST_LINES]
        ]
        by_file = table("Files", ("file", "length", "read of it", "reads", "ranks"), rows, id="files")
        yield folded(f"by file ({len(files):,})", by_file, _rest(len(files)))
    lines = [
        (
            number(rank.rank),
            size(rank.read_bytes),
            number(rank.read_ops),
            number(len(rank.extents)),
            number(rank.read_seconds, f"{rank.read_seconds:.3g} s"),
            size(rank.device_bytes),
            size(rank.peak_host_bytes),
            size(rank.peak_device_bytes),
        )
        for rank in made.ranks[:MOST_LINES]
    ]
    headings = ("rank", "reads", "operations", "files", "time", "shards", "host peak", "device peak")
    by_rank = table("Ranks, with their peaks of the load", headings, lines, id="ranks")
    yield folded(f"by rank ({len(made.ranks):,})", by_rank, _rest(len(made.ranks)))


def _rest(many: int) -> Markup:
    left = many - MOST_LINES
    return tag("p", f"and {left:,} more, which --json has", class_="note") if left > 0 else Markup("")


def _short(name: str) -> str:
    return PurePath(name).name or name or "memory"


def _map_of_reads(made: WorldPlan) -> Markup:
    """Ranks down, files across; neighbours are summed up where a page would grow too long."""
    ranks, files = len(made.ranks), len(made.stored)
    # Where there are too many cells, files are summed up first, to no fewer than 256 columns; then ranks.
    across = -(-files // max(256, MOST_CELLS // ranks))
    columns = -(-files // across)
    down = -(-ranks * columns // MOST_CELLS)
    rows = -(-ranks // down)
    read, begin, end = (np.zeros((rows, columns), np.int64) for _ in range(3))
    reads = np.zeros((rows, columns), np.int64)
    for place, rank in enumerate(made.ranks):
        column = rank.extents[:, 0] // across
        row = np.full_like(column, place // down)
        # ``add.at`` adds for each entry, where several files of a rank fall into one cell.
        np.add.at(read, (row, column), rank.extents[:, 3])
        np.add.at(reads, (row, column), rank.extents[:, 4])
        if across == down == 1:
            begin[row, column], end[row, column] = rank.extents[:, 1], rank.extents[:, 2]
    values: dict[str, Grid] = {"bytes": read, "reads": reads}
    if across == down == 1:  # from where to where is told of one rank and one file
        values |= {"begin": begin, "end": end}
    names = [_short(name) for name, _ in made.stored]
    what = "file" if files == 1 else "files"
    title = f"Who reads how much of which file: {ranks:,} ranks down, {files:,} {what} across"
    labels = [f"rank {rank.rank}" for rank in made.ranks]
    return heat("reads", title, _grouped(labels, down), _grouped(names, across), values)


def _grouped(labels: Sequence[str], by: int) -> list[Ends]:
    return [(some[0], some[-1]) for some in (labels[i : i + by] for i in range(0, len(labels), by))]


def _exchange(made: WorldPlan) -> Iterator[Markup]:
    yield tag("h2", "Exchange between ranks, in the load")
    if made.sharing is not None:
        yield tag("p", f"Reading: {made.sharing}")
    if not any(made.exchanged_bytes):
        yield tag("p", "Nothing: every rank reads all that it holds.")
        return
    yield tag("p", "All ranks together get ", size(sum(made.exchanged_bytes)), " from others.")
    if made.messages:
        between, within = size(made.between_machines_bytes), size(made.within_machines_bytes)
        yield tag("p", "Of these ", between, " go between machines, ", within, " within them.")
        yield _map_of_messages(made)
    rows = [
        (number(rank.rank), size(got))
        for rank, got in zip(made.ranks[:MOST_LINES], made.exchanged_bytes, strict=False)
    ]
    got = table("What each rank gets from others", ("rank", "gets"), rows, id="exchanged")
    yield folded("by rank", got, _rest(len(made.ranks)))


def _map_of_messages(made: WorldPlan) -> Markup:
    # At most 256 ranks on each side: 2**16 cells.
    by = -(-made.world_size // 256)
    sides = -(-made.world_size // by)
    sent = np.zeros((sides, sides), np.int64)
    for server, to, nbytes in made.messages:
        sent[server // by, to // by] += nbytes
    ranks = range(made.world_size)
    servers, receivers = [f"rank {rank}" for rank in ranks], [f"to rank {rank}" for rank in ranks]
    title = "Who sends how much to whom: from down, to across"
    return heat("messages", title, _grouped(servers, by), _grouped(receivers, by), {"bytes": sent})


def _names(made: WorldPlan) -> Iterator[Markup]:
    kinds = {
        "missing in the checkpoint": made.missing,
        "unexpected in the checkpoint": made.unexpected,
        "computed while reading": made.computed,
        "computed from whole tensors": made.computed_whole,
    }
    for kind, names in kinds.items():
        if names:
            more = [f"and {len(names) - MOST_NAMES:,} more"] if len(names) > MOST_NAMES else []
            items = [tag("li", name) for name in (*names[:MOST_NAMES], *more)]
            yield folded(f"{kind} ({len(names):,})", tag("ul", *items))
