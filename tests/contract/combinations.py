"""What goes together, for the documentation: ``python -m tests.contract.combinations`` writes the page anew.

Every engine, stage, placement or setting, and every choice of the three axes is asked of the engine itself,
with no model: it answers, or refuses in a sentence.
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
#: Which of the axes ranks share, each by 2 of the 8.
SHARING = [frozenset(chosen) for count in range(4) for chosen in itertools.combinations(AXES, count)]
RANKS = 8

HOST, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
FP32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
POLICY = CPUOffloadPolicy(pin_memory=False)


def _first_dimension(parameter: Any) -> None:
    """A ``shard_placement_fn`` that leaves it to FSDP2."""


@dataclass(frozen=True)
class Setting:
    """A placement or a setting of a load, asked only at the ``stages`` that look at it.

    ``zero`` goes into ``zero_optimization``.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    request: Mapping[str, Any] = field(default_factory=dict)
    size: int = 2

    def ask(self, engine: str, stage: int, axes: frozenset[str]) -> str | None:
        """The sentence that refuses it; None where it is served."""
        config = {**self.config, **({"zero_optimization": dict(self.zero)} if self.zero else {})}
        sizes: dict[str, Any] = {AXES[axis]: self.size for axis in axes}
        wanted = {"zero_stage": stage, "engine_config": config, **sizes, **self.request}
        try:
            Request({}, engine=engine, **wanted).resolve(RANKS)
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
#: What is served, and trains otherwise than one process for a reason of the library's own, by engine.
OTHERWISE: Mapping[str, Mapping[str, str]] = {
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
    """Engine, setting, stage, axes, and the sentence that refuses them or None."""
    for engine, settings in ENGINES.items():
        for name, setting in settings.items():
            for stage, axes in itertools.product(setting.stages, SHARING):
                yield engine, name, stage, axes, setting.ask(engine, stage, axes)


def text() -> str:
    """The whole page."""
    rows: dict[tuple[str, str], dict[int, list[str]]] = {}
    said: dict[str, int] = {}
    for engine, name, stage, _, sentence in answers():
        number = said.setdefault(sentence, len(said) + 1) if sentence is not None else None
        cell = "yes" if number is None else str(number)
        rows.setdefault((engine, name), {}).setdefault(stage, []).append(cell)
    lines = [_HEAD]
    for engine, settings in ENGINES.items():
        lines += [f"## `engine={engine!r}`", "", *_head_row()]
        for name in settings:
            lines += _rows(name, rows[engine, name])
        lines += ["", "| shared | trained otherwise than one process trains |", "|---|---|"]
        lines += [f"| {axes} | {how} |" for axes, how in OTHERWISE[engine].items()]
        lines.append("")
    lines += ["## What is said", "", *(f"{number}. `{sentence}`" for sentence, number in said.items())]
    return "\n".join(lines) + "\n"


def _head_row() -> Iterator[str]:
    yield f"| placement or setting | stages | {' | '.join(_shared(axes) for axes in SHARING)} |"
    yield "|---|---|" + "---|" * len(SHARING)


def _rows(name: str, stages: Mapping[int, list[str]]) -> Iterator[str]:
    """One row for the stages that answer alike."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for stage, cells in stages.items():
        alike.setdefault(tuple(cells), []).append(stage)
    for cells, found in alike.items():
        yield f"| {name} | {', '.join(map(str, found))} | {' | '.join(cells)} |"


def _shared(axes: frozenset[str]) -> str:
    return " + ".join(sorted(axes)) or "nothing"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
