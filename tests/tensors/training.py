"""Training of models whose tensors DeepSpeed's ranks share: a load's and stock's, as traces to compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerostart
from parity import CLIP, Trace, batches, optimizer

__all__ = ["SECTIONS", "config_of", "slices", "stock", "train"]

NORMS = {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
HEAD = {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True}
#: The section ``tensor_parallel`` for each kind of model: None where its own plan, or DeepSpeed's names, do.
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "plan": {},
    "mixtral": {"preset_model": "mixtral"},
    "phi3": {"preset_model": "phi3"},
    "qwen3-preset": {"preset_model": "qwen2", "partition_config": {"layer_specs": [NORMS, HEAD]}},
}


def config_of(stage: int, section: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **more,
    }
    if section is not None:
        config["tensor_parallel"] = {"autotp_size": 2, **section}
    return config


def train(path: Path, stage: int, section: Mapping[str, Any] | None, given: Mapping[str, Any]) -> Trace:
    """A load's; ``given`` are more of its arguments."""
    config = config_of(stage, section)
    model = zerostart.load(path, zero_stage=stage, engine_config=config, progress=False, **given)
    return _trained(model, config)


def stock(path: Path, stage: int, section: Mapping[str, Any]) -> Trace:
    """DeepSpeed's own, of the whole model on every rank."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    return _trained(model, config_of(stage, section))


def _trained(model: nn.Module, config: dict[str, Any]) -> Trace:
    """Five steps, two ranks on each batch; ``weights`` are this rank's slices after them."""
    import deepspeed

    model.train()
    loaded = zerostart.report(model) is not None if hasattr(model, "_zerostart_tensors") else False
    client = optimizer(model) if loaded else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=client or (lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4)), config=config
    )
    trace, place, parts = Trace(), dist.get_rank() // 2, dist.get_world_size() // 2
    for batch in batches(parts):
        tokens = batch[place]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        if not trace.gradients:
            trace.gradients = dict(gradients(model))
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        trace.losses.append(total.item() / dist.get_world_size())
        trace.norms.append(float(engine.get_global_grad_norm()))
    if loaded:
        for name, value in zerostart.full_tensors(engine, rank=None):
            assert value is not None
            trace.weights[name] = value
    else:
        trace.weights = slices(model)
    return trace


def gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole gradients, put together by DeepSpeed's own layers."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in model.named_parameters():
        gradient = safe_get_full_grad(parameter).clone()
        gather = getattr(parameter, "gather_params", None)
        if gather is not None:
            gather([gradient])
        yield name, gradient


def slices(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's slice of each parameter, as its forward sees it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
