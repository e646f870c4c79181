"""Models that were put together out of several loads: their shards, and what the loads did, in one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.live.record import LoadRecord, bare_model, kept_record, record_of
from zerostart.live.report import Report
from zerostart.live.shards import found_shards, put_to_rest

#: What the loads did one after the other; peaks too, as each begins where the last one ended.
_SUMMED = ("read_bytes", "planned_bytes", "exchanged_bytes", "peak_host_bytes", "peak_device_bytes")
#: What is the same of all, or not said of the whole.
_SHARED = ("reading", "engine", "tier")


def loaded_parts(model: nn.Module) -> list[tuple[str, nn.Module, LoadRecord]]:
    """Prefix, module and record of each load that is part of ``model``: of the model itself, it alone."""
    found: list[tuple[str, nn.Module, LoadRecord]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        record = kept_record(module)
        if record is not None and id(module) not in inside:
            found.append((f"{name}." if name else "", module, record))
            inside.update(id(part) for part in module.modules())
    return found


def whole_of_parts(model: nn.Module) -> nn.Module:
    """The loaded model, or the model of several loads, inside the wrappers of libraries.

    Raises ConfigError where no part of it was loaded.
    """
    inner = bare_model(model)
    if not loaded_parts(inner):
        record_of(model)  # which says so
    return inner


def live_shards(model: nn.Module, world: World) -> dict[str, Shard]:
    """The shards of the live ``model`` as they are now, by parameter name, aliases included.

    Of what was loaded by its record, of the rest in whichever engine holds it.
    """
    put_to_rest(model)
    parts = loaded_parts(model)
    loaded = {id(p) for _, part, _ in parts for p in part.parameters()}
    rest = any(id(p) not in loaded for p in model.parameters())
    shards = found_shards(model, world) if rest else {}
    for prefix, part, record in parts:
        for name, shard in record.shards(part).items():
            shards[prefix + name] = replace(shard, name=prefix + shard.name)
    return shards


def report_of(model: nn.Module) -> Report:
    """What the load of ``model`` did, or all loads of its parts together.

    Raises ConfigError where no part of it was loaded.
    """
    parts = loaded_parts(whole_of_parts(model))
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][2].report
    reports = [(prefix, record.report) for prefix, _, record in parts]
    first = reports[0][1]
    joined = {
        field.name: tuple(prefix + name for prefix, report in reports for name in getattr(report, field.name))
        for field in fields(Report)
        if isinstance(getattr(first, field.name), tuple)
    }
    every = [report for _, report in reports]
    sums = {name: _sum([getattr(report, name) for report in every]) for name in _SUMMED}
    shared = {name: _common(getattr(report, name) for report in every) for name in _SHARED}
    phases = {key: sum(report.phases[key] for report in every) for key in first.phases}
    # Each figure is of its own field's type, which a dictionary of them all cannot say.
    return replace(first, **joined, **sums, **shared, phases=phases)  # type: ignore[arg-type]


def _sum(values: list[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _common(values: Iterable[object]) -> object:
    found = list(dict.fromkeys(values))
    if len(found) == 1:
        return found[0]
    return ", ".join(map(str, found)) if isinstance(found[0], str) else None
