"""Load a model on an engine, and compare its results and full gradients."""

from typing import Any

import torch
from torch import nn

import zerostart

ENGINES = ("deepspeed", "fsdp2")
#: With the threshold 0 even small parameters do not stay gathered.
ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill parameters and persistent buffers randomly, so that lost or swapped ones show."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            if name.endswith("running_var"):
                tensor.abs_()  # its square root is taken
    return model


def load(engine: str, source: Any, model: Any, **arguments: Any) -> nn.Module:
    """Load for ``engine``; at ZeRO-3 with a persistence threshold of 0."""
    if engine == "deepspeed":
        arguments = {"engine_config": ZERO3, **arguments}
    return zerostart.load(source, model=model, engine=engine, progress=False, **arguments)


def initialize_engine(engine: str, model: nn.Module, trained: bool = False) -> tuple[nn.Module, Any]:
    """Return the module to call, and the DeepSpeed engine if there is one."""
    if engine == "deepspeed":
        import deepspeed

        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.0) if trained else None
        ds_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO3)
        return ds_engine.module, ds_engine
    return model, None


def compute_gradients(model: nn.Module, result: Any, ds_engine: Any = None) -> dict[str, torch.Tensor]:
    """Return the full gradients of a loss over the tensors in ``result``."""
    loss = sum(part.float().square().mean() for part in find_tensors(result) if part.requires_grad)
    assert isinstance(loss, torch.Tensor)
    if ds_engine is None:
        loss.backward()
    else:
        ds_engine.backward(loss)
    gradients = {n: get_full_gradient(p, ds_engine) for n, p in model.named_parameters() if p.requires_grad}
    if ds_engine is not None:
        ds_engine.step()
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def get_full_gradient(parameter: Any, ds_engine: Any) -> torch.Tensor | None:
    if ds_engine is not None:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
    return None if gradient is None else gradient.clone()


def compare_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 1e-5
) -> list[str]:
    """Describe missing, extra and wrong gradients; ``bound`` is relative to the largest element."""
    lines = [f"{name} has no gradient" for name in expected.keys() - actual.keys()]
    # DeepSpeed returns zeros for parameters without a gradient.
    lines += [f"{name} has one" for name in actual.keys() - expected.keys() if actual[name].any()]
    for name in actual.keys() & expected.keys():
        size = expected[name].float().abs().max().item()
        worst = (actual[name].float() - expected[name].float()).abs().max().item()
        if not worst <= bound * size:
            lines.append(f"the gradient of {name} is off by {worst:.1e} of {size:.1e}")
    return lines


def find_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in find_tensors(part)]


def snapshot(value: Any) -> Any:
    """Copy a result for comparison; other objects become their class name."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(part) for key, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [snapshot(part) for part in value]
    return value if isinstance(value, (str, int, float)) else type(value).__name__


def compare(actual: Any, expected: Any, tolerance: float = 0.0) -> list[str]:
    """Describe where two nested results differ by more than ``tolerance`` of the largest element.

    Equal inputs may give results that differ in the last bit: some processors compute a product in another
    way when memory begins elsewhere.
    """
    if isinstance(expected, dict):
        lines = [f"{key!r} is missing on one side" for key in actual.keys() ^ expected.keys()]
        return lines + [
            f"{k}: {line}"
            for k in actual.keys() & expected.keys()
            for line in compare(actual[k], expected[k], tolerance)
        ]
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{len(actual)} for {len(expected)} entries"]
        pairs = zip(actual, expected, strict=True)
        return [f"{n}: {line}" for n, (a, b) in enumerate(pairs) for line in compare(a, b, tolerance)]
    if isinstance(expected, torch.Tensor):
        alike = actual.dtype == expected.dtype and actual.shape == expected.shape
        same = alike and torch.equal(actual, expected)
        if alike and not same and tolerance:
            same = bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
        return [] if same else ["another tensor"]
    return [] if actual == expected else [f"{actual!r} for {expected!r}"]
