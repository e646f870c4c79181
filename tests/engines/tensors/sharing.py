"""Train tensor-parallel models on DeepSpeed, loaded by zerostart and by stock DeepSpeed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.engines.tensors.fused import Fused
from tests.parity import CLIP, Trace, batches, optimizer

#: Tensor-parallel ranks in all cases.
TENSOR_PARALLEL = 2
_NORMS = {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
_HEAD = {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True}
_OUT = {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"}
_QKV = {"patterns": [r".*\.qkv_proj\.weight$"], "shape": [[32, 16, 16], -1], "partition_dim": 0}
_UP = {"patterns": [r".*\.up_proj\.weight$"], "shape": [2, -1], "partition_dim": 0}
_DOWN = {
    "patterns": [r".*\.down_proj\.weight$"],
    "partition_type": "row",
    "shape": [-1, [16, 16]],
    "partition_dim": 1,
}
#: Sections ``tensor_parallel`` by name; an empty one uses the model's own plan or DeepSpeed's names.
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "own": {},
    "mixtral": {"preset_model": "mixtral"},
    "qwen2": {"preset_model": "qwen2", "partition_config": {"layer_specs": [_NORMS, _HEAD]}},
    "fused": {"partition_config": {"use_default_specs": False, "layer_specs": [_OUT, _QKV, _UP, _DOWN]}},
}


@dataclass(frozen=True)
class Case:
    """A training at a ZeRO stage with a section of ``SECTIONS``.

    ``in_initialize``: pass the section to ``deepspeed.initialize``, too. ``module``: class of a plain module
    whose weights are in the file ``path``. ``offloaded``: ZeRO sections that move state to the host.
    """

    path: Path
    stage: int
    section: str = "own"
    in_initialize: bool = True
    module: type[Fused] | None = None
    offloaded: tuple[str, ...] = ()


def config_of(case: Case, with_section: bool = True) -> dict[str, Any]:
    offloaded = {section: {"device": "cpu"} for section in case.offloaded}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0, **offloaded},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if with_section:
        config["tensor_parallel"] = {"autotp_size": TENSOR_PARALLEL, **SECTIONS[case.section]}
    return config


def load_case(case: Case, **options: Any) -> nn.Module:
    return zerostart.load(
        case.path,
        model=None if case.module is None else case.module.build,
        zero_stage=case.stage,
        **{
            "engine_config": config_of(case),
            "tensor_parallel": TENSOR_PARALLEL,
            "progress": False,
            **options,
        },
    )


def compare_with_stock(cases: list[Case]) -> list[tuple[Trace, list[str]]]:
    """Return each case's trace and its differences from stock DeepSpeed, bit for bit."""
    results = []
    for case in cases:
        model = load_case(case)
        before = slices(model)
        trace, after = _train(model, config_of(case, case.in_initialize))
        stock_before, stock_trace, stock_after = _train_stock(case)
        lines = _differences("slices", before, stock_before)
        lines += [w for w in ("losses", "norms") if getattr(trace, w) != getattr(stock_trace, w)]
        lines += _differences("gradients", trace.gradients, stock_trace.gradients)
        lines += _differences("trained slices", after, stock_after)
        results.append((trace, lines))
    return results


def train_loaded(case: Case) -> Trace:
    """Train a case that stock DeepSpeed cannot train."""
    return _train(load_case(case), config_of(case))[0]


def _train_stock(case: Case) -> tuple[dict[str, torch.Tensor], Trace, dict[str, torch.Tensor]]:
    """Train with DeepSpeed from whole models; return slices, the trace, and slices after it."""
    import deepspeed

    idle = {**config_of(case), "zero_optimization": {"stage": 0}}
    model = whole_model(case)
    deepspeed.initialize(model=model, config=idle)
    return slices(model), *_train(whole_model(case), config_of(case))


def whole_model(case: Case) -> nn.Module:
    """Load the unsharded model with only torch or transformers."""
    if case.module is not None:
        return case.module.from_file(case.path)
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(case.path)
    return model


def _train(model: nn.Module, config: dict[str, Any]) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Train five steps; return the trace and this rank's slices."""
    import deepspeed

    model.train()
    is_loaded = hasattr(model, "_zerostart_tensors")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    trace, group, groups = (
        Trace(),
        dist.get_rank() // TENSOR_PARALLEL,
        dist.get_world_size() // TENSOR_PARALLEL,
    )
    for batch in batches(groups):
        tokens = batch[group]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        if not trace.gradients:
            trace.gradients = dict(whole_gradients(model))
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        trace.losses.append(total.item() / dist.get_world_size())
        norm = engine.get_global_grad_norm()  # None at stage 0 in fp32
        if norm is not None:
            trace.norms.append(float(norm))
    if is_loaded:
        trace.weights = {n: t for n, t in zerostart.full_tensors(engine, rank=None) if t is not None}
    after = slices(model)
    engine.destroy()
    return trace, after


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole gradients, gathered by DeepSpeed's own layers."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = safe_get_full_grad(parameter).clone()
        gather = getattr(parameter, "gather_params", None)
        owner = model.get_submodule(name.rpartition(".")[0])
        if gather is not None and name.endswith(".bias"):
            # The layer recognises its bias by identity.
            bias, owner.bias = owner.bias, nn.Parameter(gradient)
            gather([owner.bias])
            gradient, owner.bias = owner.bias.data, bias
        elif gather is not None:
            gather([gradient])
        yield name, gradient


def slices(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's slice of each parameter, as the forward uses it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _differences(label: str, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    if a.keys() != b.keys():
        return [f"{label} differ in names: {sorted(a.keys() ^ b.keys())[:4]}"]
    return [f"{label} of {name}" for name in a if not torch.equal(a[name], b[name])]
