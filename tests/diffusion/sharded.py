"""A loaded model on an engine, run as it would be alone, with the gradients whole."""

from typing import Any

import torch
from torch import nn

import zerostart

ENGINES = ("deepspeed", "fsdp2")
#: Nothing stays gathered, however small.
ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and persistent buffer random values: one that is lost or swapped shows."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            if name.endswith("running_var"):
                tensor.abs_()  # of which roots are taken
    return model


def load(engine: str, source: Any, model: Any, **arguments: Any) -> nn.Module:
    """Load for ``engine``; at ZeRO-3 with a persistence threshold of 0."""
    if engine == "deepspeed":
        arguments = {"engine_config": ZERO3, **arguments}
    return zerostart.load(source, model=model, engine=engine, progress=False, **arguments)


def started(engine: str, model: nn.Module, trained: bool = False) -> tuple[nn.Module, Any]:
    """The module to call, and what its backward goes through, if it has trainable parameters."""
    if engine == "deepspeed":
        import deepspeed

        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.0) if trained else None
        made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO3)
        return made.module, made
    return model, None


def gradients_of(model: nn.Module, result: Any, made: Any = None) -> dict[str, torch.Tensor]:
    """The gradients of a loss of the tensors in ``result``, whole, on every rank."""
    loss = sum(part.float().square().mean() for part in tensors_in(result) if part.requires_grad)
    assert isinstance(loss, torch.Tensor)
    if made is None:
        loss.backward()
    else:
        made.backward(loss)
    found = {n: whole_gradient(p, made) for n, p in model.named_parameters() if p.requires_grad}
    if made is not None:
        made.step()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def whole_gradient(parameter: Any, made: Any) -> torch.Tensor | None:
    """The gradient of a parameter, wherever its shares are."""
    if made is not None:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
    return None if gradient is None else gradient.clone()


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float = 1e-5) -> list[str]:
    """Gradients that are there once only, or off by more than ``bound`` of the largest element."""
    lines = [f"{name} has no gradient" for name in wanted.keys() - found.keys()]
    # DeepSpeed gives zeros to what has none.
    lines += [f"{name} has one" for name in found.keys() - wanted.keys() if found[name].any()]
    for name in found.keys() & wanted.keys():
        size = wanted[name].float().abs().max().item()
        worst = (found[name].float() - wanted[name].float()).abs().max().item()
        if not worst <= bound * size:
            lines.append(f"the gradient of {name} is off by {worst:.1e} of {size:.1e}")
    return lines


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a nest of lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def kept(value: Any) -> Any:
    """A copy of a result, with what is compared of it; of an object only its class."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(part) for key, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [kept(part) for part in value]
    return value if isinstance(value, (str, int, float)) else type(value).__name__


def differing(found: Any, wanted: Any, within: float = 0.0) -> list[str]:
    """Where two nests of lists, dicts and tensors differ by a bit, or by more than ``within`` of the largest.

    What is computed from the same bits may differ in the last one: on some processors a product takes another
    path where memory begins elsewhere.
    """
    if isinstance(wanted, dict):
        lost = [f"{key!r} is there once only" for key in found.keys() ^ wanted.keys()]
        return lost + [
            f"{k}: {line}"
            for k in found.keys() & wanted.keys()
            for line in differing(found[k], wanted[k], within)
        ]
    if isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            return [f"{len(found)} for {len(wanted)} entries"]
        pairs = zip(found, wanted, strict=True)
        return [
            f"{n}: {line}" for n, (one, other) in enumerate(pairs) for line in differing(one, other, within)
        ]
    if isinstance(wanted, torch.Tensor):
        same = found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
        if not same and within and found.dtype == wanted.dtype and found.shape == wanted.shape:
            same = bool((found - wanted).abs().max() <= within * wanted.abs().max())
        return [] if same else ["another tensor"]
    return [] if found == wanted else [f"{found!r} for {wanted!r}"]
