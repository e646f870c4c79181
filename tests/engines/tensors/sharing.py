"""Training of models whose tensors DeepSpeed's ranks share: a load's and stock's, as traces to compare."""

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

#: Ranks that share tensors, in all cases.
SHARING = 2
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
#: The section ``tensor_parallel`` by name; the model's own plan, or DeepSpeed's names, where it is empty.
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "own": {},
    "mixtral": {"preset_model": "mixtral"},
    "qwen2": {"preset_model": "qwen2", "partition_config": {"layer_specs": [_NORMS, _HEAD]}},
    "fused": {"partition_config": {"use_default_specs": False, "layer_specs": [_OUT, _QKV, _UP, _DOWN]}},
}


@dataclass(frozen=True)
class Case:
    """A training: of the checkpoint ``path`` at a stage, with a section of ``SECTIONS``.

    ``told``: whether ``deepspeed.initialize`` is given the section, too. ``module``: of a plain module, of
    which the file ``path`` has the weights. ``offloaded``: the sections that put something on the host.
    """

    path: Path
    stage: int
    section: str = "own"
    told: bool = True
    module: type[Fused] | None = None
    offloaded: tuple[str, ...] = ()


def config_of(case: Case, told: bool = True) -> dict[str, Any]:
    offloaded = {section: {"device": "cpu"} for section in case.offloaded}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0, **offloaded},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if told:
        config["tensor_parallel"] = {"autotp_size": SHARING, **SECTIONS[case.section]}
    return config


def loaded(case: Case, **more: Any) -> nn.Module:
    return zerostart.load(
        case.path,
        model=None if case.module is None else case.module.build,
        zero_stage=case.stage,
        **{"engine_config": config_of(case), "tensor_parallel": SHARING, "progress": False, **more},
    )


def compared(cases: list[Case]) -> list[tuple[Trace, list[str]]]:
    """Of each case its trace, and where it differs from stock's in a bit."""
    found = []
    for case in cases:
        model = loaded(case)
        before = slices(model)
        trace, after = _trained(model, config_of(case, case.told))
        theirs, other, trained = _stock(case)
        wrong = _differing("slices", before, theirs)
        wrong += [w for w in ("losses", "norms") if getattr(trace, w) != getattr(other, w)]
        wrong += _differing("gradients", trace.gradients, other.gradients)
        wrong += _differing("trained slices", after, trained)
        found.append((trace, wrong))
    return found


def trained(case: Case) -> Trace:
    """The trace of a case that stock cannot train."""
    return _trained(loaded(case), config_of(case))[0]


def _stock(case: Case) -> tuple[dict[str, torch.Tensor], Trace, dict[str, torch.Tensor]]:
    """DeepSpeed's own, of the whole model on every rank: slices, the trace, and slices after it."""
    import deepspeed

    idle = {**config_of(case), "zero_optimization": {"stage": 0}}
    model = whole_model(case)
    deepspeed.initialize(model=model, config=idle)
    return slices(model), *_trained(whole_model(case), config_of(case))


def whole_model(case: Case) -> nn.Module:
    """The model unsharded, with nothing but torch or transformers."""
    if case.module is not None:
        return case.module.filled(case.path)
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(case.path)
    return model


def _trained(model: nn.Module, config: dict[str, Any]) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Five steps, the ranks that share tensors on one batch; whole weights of a load, and the slices."""
    import deepspeed

    model.train()
    ours = hasattr(model, "_zerostart_tensors")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    trace, place, parts = Trace(), dist.get_rank() // SHARING, dist.get_world_size() // SHARING
    for batch in batches(parts):
        tokens = batch[place]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        if not trace.gradients:
            trace.gradients = dict(whole_gradients(model))
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        trace.losses.append(total.item() / dist.get_world_size())
        norm = engine.get_global_grad_norm()  # None at stage 0 in fp32.
        if norm is not None:
            trace.norms.append(float(norm))
    if ours:
        trace.weights = {n: t for n, t in zerostart.full_tensors(engine, rank=None) if t is not None}
    after = slices(model)
    engine.destroy()
    return trace, after


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole gradients, put together by DeepSpeed's own layers."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = safe_get_full_grad(parameter).clone()
        gather = getattr(parameter, "gather_params", None)
        owner = model.get_submodule(name.rpartition(".")[0])
        if gather is not None and name.endswith(".bias"):
            # The layer knows its bias by identity.
            held, owner.bias = owner.bias, nn.Parameter(gradient)
            gather([owner.bias])
            gradient, owner.bias = owner.bias.data, held
        elif gather is not None:
            gather([gradient])
        yield name, gradient


def slices(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's slice of each parameter, as its forward sees it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _differing(what: str, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    if a.keys() != b.keys():
        return [f"{what} differ in names: {sorted(a.keys() ^ b.keys())[:4]}"]
    return [f"{what} of {name}" for name in a if not torch.equal(a[name], b[name])]
