"""Write the page of combinations again: ``python -m tests.contract.combinations``.

Asks each engine, without a model, for every stage, setting and choice of the three axes: it accepts, or
refuses with a sentence.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from zerostart.errors import ZerostartError
from zerostart.loading.request import Request

PATH = Path(__file__).parents[2] / "docs" / "generated" / "combinations.md"

AXES = {"E": "expert_parallel", "S": "sequence_parallel", "T": "tensor_parallel"}
#: Sets of axes, each of size 2 on the 8 ranks.
AXIS_SETS = [frozenset(axes) for count in range(4) for axes in itertools.combinations(AXES, count)]
RANKS = 8

HOST, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
FP32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
POLICY = CPUOffloadPolicy(pin_memory=False)


def _first_dimension(parameter: Any) -> None:
    """Choose FSDP2's default, as a ``shard_placement_fn``."""


@dataclass(frozen=True)
class Setting:
    """A placement or setting of a load, for the ``stages`` that read it."""

    config: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    request: Mapping[str, Any] = field(default_factory=dict)
    size: int = 2

    def ask(self, engine: str, stage: int, axes: frozenset[str]) -> str | None:
        """Return the sentence that refuses the setting, None if it is accepted."""
        config = {**self.config, **({"zero_optimization": dict(self.zero)} if self.zero else {})}
        sizes: dict[str, Any] = {AXES[axis]: self.size for axis in axes}
        options = {"zero_stage": stage, "engine_config": config, **sizes, **self.request}
        try:
            Request({}, engine=engine, **options).resolve(RANKS)
        except ZerostartError as error:
            return str(error)
        return None


_EXCHANGE = Setting(request={"exchange": True})
_BOTH = {"tp_plan": {"a": "colwise"}, "tensor_parallel": {"preset_model": "llama"}}
ENGINES: Mapping[str, Mapping[str, Setting]] = {
    "deepspeed": {
        "on the device": Setting(),
        "`offload_optimizer` to the host": Setting(zero={"offload_optimizer": HOST}, stages=(1, 2, 3)),
        "`offload_optimizer` to NVMe": Setting(zero={"offload_optimizer": NVME}, stages=(3,)),
        "`offload_param` to the host": Setting(zero={"offload_param": HOST}, stages=(3,)),
        "both to the host": Setting(zero={"offload_optimizer": HOST, "offload_param": HOST}, stages=(3,)),
        "`offload_param` to NVMe": Setting(zero={"offload_param": NVME}, stages=(3,)),
        "`zero_hpz_partition_size: 2`": Setting(zero={"zero_hpz_partition_size": 2}, stages=(3,)),
        "`zero_hpz_partition_size: 3`": Setting(zero={"zero_hpz_partition_size": 3}, stages=(3,)),
        "bf16, `grad_accum_dtype` fp32": Setting(FP32_SUMS),
        "`reduce_scatter: false`": Setting(zero={"reduce_scatter": False}),
        "`contiguous_gradients: false`": Setting(zero={"contiguous_gradients": False}),
        "`gradient_predivide_factor`": Setting(config={"gradient_predivide_factor": 2.0}),
        "the same, `reduce_scatter: false`": Setting(
            config={"gradient_predivide_factor": 2.0}, zero={"reduce_scatter": False}
        ),
        "the same, by all ranks": Setting(
            config={"gradient_predivide_factor": 8.0}, zero={"reduce_scatter": False}, stages=(3,)
        ),
        "`use_data_before_expert_parallelism`": Setting(config={"use_data_before_expert_parallelism": True}),
        "the pass `autotp` of `compile`": Setting(config={"compile": {"passes": ["autotp"]}}),
        "`tp_plan` beside `preset_model`": Setting(config=_BOTH),
        "`sequence_parallel_size: 4`": Setting(config={"sequence_parallel_size": 4}),
        "`tensor_parallel.autotp_size: 4`": Setting(config={"tensor_parallel": {"autotp_size": 4}}),
        "`expert_parallel.autoep_size: 4`": Setting(
            config={"expert_parallel": {"enabled": True, "autoep_size": 4}}
        ),
        "`exchange=True` of the load": _EXCHANGE,
        "`stage: 3` in the configuration": Setting(zero={"stage": 3}),
        "the axes of 3 ranks": Setting(size=3),
    },
    "fsdp2": {
        "on the device": Setting(),
        "`offload_policy`": Setting({"offload_policy": POLICY}),
        "`replicate: 2`": Setting({"replicate": 2}),
        "`replicate: 8`": Setting(config={"replicate": 8}),
        "`mesh`": Setting({"mesh": DeviceMesh("cpu", list(range(RANKS)), _init_backend=False, _rank=0)}),
        "`reshard_after_forward: 2`": Setting({"reshard_after_forward": 2}),
        "`shard_placement_fn`": Setting({"shard_placement_fn": _first_dimension}),
        "`exchange=True` of the load": _EXCHANGE,
        "`tensor_parallel.autotp_size: 4`": Setting(config={"tensor_parallel": {"autotp_size": 4}}),
        "the axes of 3 ranks": Setting(size=3),
        "the axes of 4 ranks": Setting(size=4),
    },
}
#: Accepted combinations that train unlike one process because of the library, by engine.
DEVIATIONS: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "S, in transformers' `Trainer`, rows of several lengths": (
            "the mean of the means of its micro-batches: tokens of short rows count more; "
            "rows of equal length are right"
        ),
        "S, in transformers' `Trainer`, stages 1, 2": (
            "gradients and the logged norm times the ranks that share a sequence; "
            "set `max_grad_norm` to as many times more, or use stage 3"
        ),
        "T, with dropout": (
            "what ranks share is dropped out alike, and so are the heads of each; heads that are shared "
            "unevenly, with dropout of attention, are refused"
        ),
    },
    "fsdp2": {
        "T, with dropout": "what ranks share is dropped out alike, and so are the heads of each",
    },
}

_HEAD = """---
orphan: true
---

# Everything together

Generated by `python -m tests.contract.combinations`, which asks the engines; do not edit.
`tests/contract/test_combinations.py` compares.

A cell is served ("yes"), or has the number of the [sentence](#what-is-said) that refuses it: on every rank,
before any weight is read. Columns are what is shared, by 2 of 8 ranks each: **E** experts, **S** sequences,
**T** tensors. Placements of DeepSpeed's stage 3 are asked there alone; below it DeepSpeed does not look at
them. What a *model* must have for an axis (heads that divide, a plan) is in
[parallelism.md](../parallelism.md).
"""


def answers() -> Iterator[tuple[str, str, int, frozenset[str], str | None]]:
    """Yield engine, setting, stage, axes, and the refusing sentence or None."""
    for engine, settings in ENGINES.items():
        for name, setting in settings.items():
            for stage, axes in itertools.product(setting.stages, AXIS_SETS):
                yield engine, name, stage, axes, setting.ask(engine, stage, axes)


def text() -> str:
    """Return the page."""
    rows: dict[tuple[str, str], dict[int, list[str]]] = {}
    numbers: dict[str, int] = {}
    for engine, name, stage, _, sentence in answers():
        number = numbers.setdefault(sentence, len(numbers) + 1) if sentence is not None else None
        cell = "yes" if number is None else str(number)
        rows.setdefault((engine, name), {}).setdefault(stage, []).append(cell)
    lines = [_HEAD]
    for engine, settings in ENGINES.items():
        lines += [f"## `engine={engine!r}`", "", *_head_row()]
        for name in settings:
            lines += _rows(name, rows[engine, name])
        lines += ["", "| shared | trained otherwise than one process trains |", "|---|---|"]
        lines += [f"| {axes} | {how} |" for axes, how in DEVIATIONS[engine].items()]
        lines.append("")
    lines += ["## What is said", "", *(f"{number}. `{sentence}`" for sentence, number in numbers.items())]
    return "\n".join(lines) + "\n"


def _head_row() -> Iterator[str]:
    yield f"| placement or setting | stages | {' | '.join(_axes_label(axes) for axes in AXIS_SETS)} |"
    yield "|---|---|" + "---|" * len(AXIS_SETS)


def _rows(name: str, stages: Mapping[int, list[str]]) -> Iterator[str]:
    """Yield one row for each group of stages with the same answers."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for stage, cells in stages.items():
        groups.setdefault(tuple(cells), []).append(stage)
    for cells, equal_stages in groups.items():
        yield f"| {name} | {', '.join(map(str, equal_stages))} | {' | '.join(cells)} |"


def _axes_label(axes: frozenset[str]) -> str:
    return " + ".join(sorted(axes)) or "nothing"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
