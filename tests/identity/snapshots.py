"""Record unsharded models and compare sharded ones with them.

The values of a sharded model are read twice: by zerostart's `full_tensors`, and by the engine's own gather
as an independent expectation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Snapshot:
    """Everything that a load has to reproduce."""

    state: dict[str, torch.Tensor]  # parameters and persistent buffers, tied duplicates included
    unsaved: dict[str, torch.Tensor]  # non-persistent buffers
    attributes: dict[str, torch.Tensor]  # tensors that modules hold as plain attributes
    parameters: dict[str, bool]  # requires_grad, in the order of named_parameters
    ties: list[list[str]]  # groups of names of one parameter
    training: dict[str, bool]  # mode of every module
    classes: dict[str, str]  # class of every module
    config: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> "Snapshot":
        """Record an unsharded model."""
        config = getattr(model, "config", None)
        return cls(
            state={name: tensor.clone() for name, tensor in model.state_dict().items()},
            unsaved=_unsaved(model),
            attributes=dict(_attributes(model)),
            parameters={name: p.requires_grad for name, p in model.named_parameters()},
            ties=ties_of(model),
            training={name: module.training for name, module in model.named_modules()},
            classes={name: type(module).__name__ for name, module in model.named_modules()},
            config=_plain_config(config),
        )


def pretrained(path: Path, dtype: torch.dtype | None, class_name: str | None = None) -> nn.Module:
    """Load the unsharded model with transformers."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    model_class = getattr(transformers, class_name or config.architectures[0])
    return model_class.from_pretrained(path, dtype=dtype or "auto")  # type: ignore[no-any-return]


def differences(model: nn.Module, reference: Snapshot, engine: str, stage: int = 3) -> list[str]:
    """List the differences of this rank's ``model``; collective."""
    import zerostart

    pairs = list(zerostart.full_tensors(model, rank=None))
    lines = [f"full_tensors yields {name} twice" for name, count in _counts(pairs) if count > 1]
    lines += _compare("full_tensors", dict(pairs), reference.state)
    lines += _compare("engine's gather", engine_state(model, engine), reference.state)
    lines += _compare("non-persistent buffer", _unsaved(model), reference.unsaved)
    lines += _compare("plain attribute", dict(_attributes(model)), reference.attributes)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    lines += describe_difference("requires_grad", list(trainable.items()), list(reference.parameters.items()))
    lines += describe_difference("ties", ties_of(model), reference.ties)
    training = {name: module.training for name, module in model.named_modules()}
    lines += describe_difference("training mode", training, reference.training)
    if engine == "deepspeed":  # fully_shard derives classes on purpose; ZeRO-3 must leave them alone.
        classes = {name: type(module).__name__ for name, module in model.named_modules()}
        lines += describe_difference("module classes", classes, reference.classes)
    lines += describe_difference("config", _plain_config(getattr(model, "config", None)), reference.config)
    if stage < 3:
        return lines
    return lines + (_check_partitions(model) if engine == "deepspeed" else _check_shards(model))


def engine_state(model: nn.Module, engine: str) -> dict[str, torch.Tensor]:
    """Gather the whole state dict by the engine; collective."""
    whole: dict[str, torch.Tensor] = {}
    unsaved = _unsaved(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole[name] = _gather(parameter, engine)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in unsaved:
            whole[name] = buffer.clone()
    return whole


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare dtype, shape and bits: NaN equals NaN, -0.0 differs from 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*bits)


def describe_difference(subject: str, actual: Any, expected: Any) -> list[str]:
    """Return one line if two values differ; mappings show only differing entries."""
    if actual == expected:
        return []
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        keys = [key for key in {**expected, **actual} if actual.get(key, ...) != expected.get(key, ...)]
        actual, expected = {k: actual.get(k) for k in keys}, {k: expected.get(k) for k in keys}
    return [f"{subject}: found {actual}, expected {expected}"]


def _gather(parameter: nn.Parameter, engine: str) -> torch.Tensor:
    if engine == "deepspeed":
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.full_tensor().detach().clone()  # type: ignore[operator]  # a DTensor


def _compare(
    origin: str, actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    lines = [f"{origin}: {name} is missing" for name in expected.keys() - actual.keys()]
    lines += [f"{origin}: {name} is not in the reference" for name in actual.keys() - expected.keys()]
    for name in expected.keys() & actual.keys():
        got, want = actual[name], expected[name]
        if got is None:
            lines.append(f"{origin}: {name} is None")
        elif got.dtype != want.dtype or got.shape != want.shape:
            lines.append(
                f"{origin}: {name} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
            )
        elif got.device != want.device:
            lines.append(f"{origin}: {name} is on {got.device}, not on {want.device}")
        elif not same_bits(got, want):
            count = int((got != want).sum())
            lines.append(f"{origin}: {name} has {count} of {want.numel()} elements wrong")
    return sorted(lines)


def _counts(pairs: list[tuple[str, Any]]) -> list[tuple[str, int]]:
    names = [name for name, _ in pairs]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _unsaved(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                buffers[f"{path}.{name}".lstrip(".")] = buffer.clone()
    return buffers


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in attributes of modules, also within lists, tuples and dicts."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name.startswith(("_parameters", "_buffers", "_modules", "ds_", "_ds", "_fsdp")):
                continue
            yield from _tensors(f"{path}.{name}".lstrip("."), value)


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value.clone()
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(f"{path}[{number}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{path}[{key!r}]", item)


def ties_of(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


PLANS = ("base_model_ep_plan", "base_model_tp_plan")


def _plain_config(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    # transformers has a configuration object, diffusers a mapping.
    plain: dict[str, Any] = dict(config) if isinstance(config, Mapping) else config.to_dict()
    # Quantizers of older releases add plans for scales even when they dequantise.
    plain = {key: value for key, value in plain.items() if key not in PLANS}
    return plain | {
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
    }


def _check_partitions(model: nn.Module) -> list[str]:
    """Check ZeRO-3's invariants: partition size, zero padding, freed parameters, ids."""
    lines = []
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, p in model.named_parameters():
        part: torch.Tensor = p.ds_tensor  # type: ignore[assignment]
        size = -(-p.ds_numel // world)  # type: ignore[operator]
        if part.dim() != 1 or part.numel() != size:
            lines.append(f"partition of {name} has shape {tuple(part.shape)}, not ({size},)")
        used = min(max(p.ds_numel - rank * size, 0), size)  # type: ignore[operator]
        if part[used:].contiguous().view(torch.uint8).any():
            lines.append(f"partition of {name}: the padding after element {used} is not zero")
        if p.numel() != 0:
            lines.append(f"{name} still holds {p.numel()} elements")
        if part.requires_grad:
            lines.append(f"partition of {name} requires grad")
    numbers: list[Any] = [None] * world
    dist.all_gather_object(numbers, [(name, p.ds_id) for name, p in model.named_parameters()])
    return lines + [f"ds_id differs on rank {r}" for r in range(world) if numbers[r] != numbers[0]]


def _check_shards(model: nn.Module) -> list[str]:
    """Check that each parameter is a DTensor with this rank's rows."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    lines = [] if isinstance(model, FSDPModule) else ["the model is not an FSDPModule"]
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor) or p.placements != (Shard(0),):
            lines.append(f"{name} is {type(p).__name__} {getattr(p, 'placements', None)}")
            continue
        rows = [chunk.shape[0] for chunk in torch.empty(p.shape[0], 0).chunk(world)] + [0] * world
        local = p.to_local()
        if local.dim() != p.dim() or local.shape[0] != rows[rank]:
            lines.append(f"shard of {name} is {tuple(local.shape)}, not {rows[rank]} rows")
    return lines
