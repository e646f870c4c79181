"""The stock way into ZeRO stages 1 and 2, ours, and what the two leave behind: everything to the bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerostart

#: Parameters of a module "head", which was added, are groups of their own.
APART = ", the head apart"
#: Smaller than that of any model used.
VOCABULARY = 80
#: By name, lists of tensors or floats.
State = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One configuration: ``zero`` and ``top`` of DeepSpeed, and how the client groups its parameters."""

    stage: int = 2
    bf16: bool = True
    groups: str = "one"
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    exchange: bool = False
    fp16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32


_ACCUMULATED = {"data_types": {"grad_accum_dtype": "fp32"}}
_OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
_DEALT, _ALIGNED = {"round_robin_gradients": True}, {"parameter_alignment": True}
_FP16 = {"fp16": {"enabled": True, "loss_scale": 64}}

CASES = {
    "stage 1": Case(stage=1),
    "stage 2": Case(),
    "stage 2, exchanged": Case(exchange=True),
    "stage 1 in fp32": Case(stage=1, bf16=False),
    "stage 2 in fp32": Case(bf16=False, exchange=True),
    "round robin": Case(zero={"round_robin_gradients": True}),
    "round robin, exchanged": Case(zero={"round_robin_gradients": True}, exchange=True),
    "aligned": Case(zero={"parameter_alignment": True}),
    "decay": Case(groups="decay"),
    "decay, round robin, aligned": Case(
        groups="decay", zero={"round_robin_gradients": True, "parameter_alignment": True}, exchange=True
    ),
    "shuffled, stage 1": Case(stage=1, groups="shuffled", bf16=False),
    "frozen": Case(groups="frozen"),
    "offloaded": Case(groups="decay", zero={"offload_optimizer": {"device": "cpu"}}),
    "stage 1 offloaded": Case(stage=1, zero={"offload_optimizer": {"device": "cpu"}}),
    "BF16_Optimizer": Case(stage=1, top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "BF16_Optimizer, decay": Case(
        stage=1, groups="decay", top={"data_types": {"grad_accum_dtype": "fp32"}}, exchange=True
    ),
    "fp32 accumulation": Case(top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage 1, round robin": Case(stage=1, zero=_DEALT, exchange=True),
    "stage 1 in fp32, aligned": Case(stage=1, bf16=False, zero=_ALIGNED, groups="decay", exchange=True),
    "stage 2 in fp32, round robin, aligned": Case(bf16=False, zero=_DEALT | _ALIGNED),
    "stage 1, frozen, aligned": Case(stage=1, groups="frozen", zero=_ALIGNED, exchange=True),
    "frozen, round robin, in fp32": Case(groups="frozen", zero=_DEALT, bf16=False),
    "frozen, offloaded": Case(groups="frozen", zero=_OFFLOADED, exchange=True),
    "offloaded, round robin, aligned": Case(groups="decay", zero=_OFFLOADED | _DEALT | _ALIGNED),
    "stage 1 offloaded in fp32, decay": Case(stage=1, groups="decay", bf16=False, zero=_OFFLOADED),
    "BF16_Optimizer, frozen": Case(stage=1, groups="frozen", top=_ACCUMULATED, exchange=True),
    "fp32 accumulation, stage 1 offloaded": Case(stage=1, zero=_OFFLOADED, top=_ACCUMULATED),
    "fp32 accumulation, decay, round robin": Case(groups="decay", zero=_DEALT, top=_ACCUMULATED),
    "bf16 accumulation, stage 1": Case(stage=1, top={"data_types": {"grad_accum_dtype": "bf16"}}),
    "two batches a step": Case(top={"gradient_accumulation_steps": 2}, groups="decay"),
    "BF16_Optimizer, two batches a step": Case(
        stage=1, groups="decay", top={"gradient_accumulation_steps": 2, **_ACCUMULATED}
    ),
    "fp16": Case(bf16=False, fp16=True, top=_FP16, exchange=True),
    "fp16, stage 1, decay, aligned": Case(
        stage=1, bf16=False, fp16=True, groups="decay", zero=_ALIGNED, top=_FP16
    ),
    "fp16, offloaded": Case(bf16=False, fp16=True, zero=_OFFLOADED, top=_FP16),
}


def available(cases: Mapping[str, Case]) -> list[str]:
    """The names of those that DeepSpeed's accelerator has a dtype for on this machine; call it in a rank."""
    from deepspeed.accelerator import get_accelerator

    supported = get_accelerator().supported_dtypes()
    return [name for name, case in cases.items() if case.dtype in supported]


def config_of(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 1000, **case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.bf16},
        **case.top,
    }


def grouped(model: nn.Module, how: str) -> list[dict[str, Any]]:
    """Parameter groups of the client's optimizer."""
    if how.endswith(APART):
        head = {id(p) for p in model.get_submodule("head").parameters()}
        groups = grouped(model, how.removesuffix(APART))
        return [
            {**group, "params": [p for p in group["params"] if (id(p) in head) == apart]}
            for group in groups
            for apart in (False, True)
        ]
    named = list(model.named_parameters())
    if how == "frozen":
        for _, parameter in named[::3]:
            parameter.requires_grad_(False)
    kept = [(name, p) for name, p in named if p.requires_grad]
    if how in ("one", "frozen"):
        return [{"params": [p for _, p in kept]}]
    if how == "shuffled":
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(5)).tolist()
        thirds = [[kept[i][1] for i in order[start::3]] for start in range(3)]
        return [{"params": third, "lr": 1e-3 * (n + 1)} for n, third in enumerate(thirds)]
    decayed = [p for name, p in kept if p.ndim > 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": [p for _, p in kept if p.ndim == 1]}]


def stock(path: Path, case: Case) -> nn.Module:
    """Transformers' own load, on every rank."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=case.dtype)


def ours(path: Path, case: Case, **options: Any) -> nn.Module:
    return zerostart.load(
        path,
        zero_stage=case.stage,
        engine_config=config_of(case),
        dtype=None if case.bf16 else case.dtype,
        exchange=case.exchange,
        progress=False,
        **options,
    )


def started(model: nn.Module, case: Case) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(grouped(model, case.groups), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))[0]


#: Of BF16_Optimizer, of DeepSpeedZeroOptimizer, and of FP16_Optimizer, which stage 0 has.
_BUFFERS = (
    *("bf16_groups_flat", "fp32_groups_flat_partition", "group_paddings"),
    *("bit16_groups_flat", "single_partition_of_fp32_groups", "groups_padding"),
    *("fp16_groups_flat", "fp32_groups_flat"),
)


def state_of(engine: Any) -> State:
    """Flat buffers, partitions, masters and padding of the engine, copied."""
    o = engine.optimizer
    found: State = {"kind": type(o).__name__}
    for name in _BUFFERS:
        if hasattr(o, name):
            found[name] = [v.detach().clone() if torch.is_tensor(v) else v for v in getattr(o, name)]
    found["parameters"] = [p.detach().clone() for p in engine.module.parameters()]
    found["buffers"] = [b.detach().clone() for b in engine.module.buffers()]
    return found


def losses(engine: Any, steps: int = 5) -> list[float]:
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + engine.global_rank)
        ids = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def followed(model: nn.Module, case: Case) -> State:
    """Start the engine, look, train, look again."""
    engine = started(model.train(), case)
    before = state_of(engine)
    found = {f"start {key}": value for key, value in before.items()}
    found["losses"] = losses(engine)
    found |= {f"end {key}": value for key, value in state_of(engine).items()}
    engine.destroy()
    return found


def differing(found: State, wanted: State) -> list[str]:
    """The keys of what is not the same to the bit."""
    return sorted(found.keys() ^ wanted.keys()) + [
        key for key in found.keys() & wanted.keys() if not _same(found[key], wanted[key])
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
