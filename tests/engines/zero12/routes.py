"""Start ZeRO stages 1 and 2 by DeepSpeed's stock route and by ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerostart

#: Suffix of ``Case.groups``: the added module "head" has separate groups.
HEAD_SEPARATE = ", head separate"
#: Smaller than any model's vocabulary.
VOCABULARY = 80
#: Lists of tensors or floats, by name.
State = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """DeepSpeed's configuration (``zero``: ZeRO section; ``top``: other keys) and the client's groups."""

    stage: int = 2
    bf16: bool = True
    groups: str = "one"
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    exchange: bool = False
    fp16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
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
    """List the cases whose dtype DeepSpeed supports here; call it in a rank."""
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


def parameter_groups(model: nn.Module, how: str) -> list[dict[str, Any]]:
    """Return the parameter groups of the client's optimizer."""
    if how.endswith(HEAD_SEPARATE):
        head = {id(p) for p in model.get_submodule("head").parameters()}
        groups = parameter_groups(model, how.removesuffix(HEAD_SEPARATE))
        return [
            {**group, "params": [p for p in group["params"] if (id(p) in head) == in_head]}
            for group in groups
            for in_head in (False, True)
        ]
    named = list(model.named_parameters())
    if how == "frozen":
        for _, parameter in named[::3]:
            parameter.requires_grad_(False)
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if how in ("one", "frozen"):
        return [{"params": [p for _, p in trainable]}]
    if how == "shuffled":
        order = torch.randperm(len(trainable), generator=torch.Generator().manual_seed(5)).tolist()
        thirds = [[trainable[i][1] for i in order[start::3]] for start in range(3)]
        return [{"params": third, "lr": 1e-3 * (n + 1)} for n, third in enumerate(thirds)]
    decayed = [p for name, p in trainable if p.ndim > 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": [p for _, p in trainable if p.ndim == 1]}]


def stock(path: Path, case: Case) -> nn.Module:
    """Load with transformers on every rank."""
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


def start_engine(model: nn.Module, case: Case) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(parameter_groups(model, case.groups), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))[0]


#: Attributes of BF16_Optimizer, of DeepSpeedZeroOptimizer, and of FP16_Optimizer (stage 0).
_BUFFERS = (
    *("bf16_groups_flat", "fp32_groups_flat_partition", "group_paddings"),
    *("bit16_groups_flat", "single_partition_of_fp32_groups", "groups_padding"),
    *("fp16_groups_flat", "fp32_groups_flat"),
)


def state_of(engine: Any) -> State:
    """Copy the engine's flat buffers, partitions, masters and padding."""
    o = engine.optimizer
    state: State = {"kind": type(o).__name__}
    for name in _BUFFERS:
        if hasattr(o, name):
            state[name] = [v.detach().clone() if torch.is_tensor(v) else v for v in getattr(o, name)]
    state["parameters"] = [p.detach().clone() for p in engine.module.parameters()]
    state["buffers"] = [b.detach().clone() for b in engine.module.buffers()]
    return state


def losses(engine: Any, steps: int = 5) -> list[float]:
    values = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + engine.global_rank)
        ids = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        values.append(loss.item())
    return values


def trace_training(model: nn.Module, case: Case) -> State:
    """Return the engine's state before and after a training, with the losses."""
    engine = start_engine(model.train(), case)
    before = state_of(engine)
    trace = {f"start {key}": value for key, value in before.items()}
    trace["losses"] = losses(engine)
    trace |= {f"end {key}": value for key, value in state_of(engine).items()}
    engine.destroy()
    return trace


def differing_keys(actual: State, expected: State) -> list[str]:
    """List the keys whose values are not equal bit for bit."""
    return sorted(actual.keys() ^ expected.keys()) + [
        key for key in actual.keys() & expected.keys() if not _equal(actual[key], expected[key])
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)
