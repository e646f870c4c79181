"""What an unsharded model holds, written down, and a sharded model compared with it bit for bit.

The values of a sharded model are read twice: through zerostart's own `full_tensors`, and through the
engine's gather, which is upstream's code and so an expectation that is not ours.
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
    """Everything that a load has to reproduce, by state-dict name or by dotted path."""

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
        """Write down an unsharded model."""
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
    """Transformers' own unsharded load by the class that the checkpoint's config names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    kind = getattr(transformers, class_name or config.architectures[0])
    return kind.from_pretrained(path, dtype=dtype or "auto")  # type: ignore[no-any-return]


def differences(model: nn.Module, reference: Snapshot, engine: str, stage: int = 3) -> list[str]:
    """Collective. One line for each thing in which this rank's ``model`` differs; none if it is identical."""
    import zerostart

    yielded = list(zerostart.full_tensors(model, rank=None))
    lines = [f"full_tensors yields {name} twice" for name, count in _counts(yielded) if count > 1]
    lines += _compare("full_tensors", dict(yielded), reference.state)
    lines += _compare("engine's gather", engine_state(model, engine), reference.state)
    lines += _compare("non-persistent buffer", _unsaved(model), reference.unsaved)
    lines += _compare("plain attribute", dict(_attributes(model)), reference.attributes)
    found = {name: p.requires_grad for name, p in model.named_parameters()}
    lines += unlike("requires_grad", list(found.items()), list(reference.parameters.items()))
    lines += unlike("ties", ties_of(model), reference.ties)
    training = {name: module.training for name, module in model.named_modules()}
    lines += unlike("training mode", training, reference.training)
    if engine == "deepspeed":  # fully_shard derives classes on purpose; ZeRO-3 must leave them alone.
        classes = {name: type(module).__name__ for name, module in model.named_modules()}
        lines += unlike("module classes", classes, reference.classes)
    lines += unlike("config", _plain_config(getattr(model, "config", None)), reference.config)
    if stage < 3:
        return lines
    return lines + (_partitions(model) if engine == "deepspeed" else _shards(model))


def engine_state(model: nn.Module, engine: str) -> dict[str, torch.Tensor]:
    """Collective. The whole state dict as the engine's own gather gives it."""
    whole: dict[str, torch.Tensor] = {}
    unsaved = _unsaved(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole[name] = _gathered(parameter, engine)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in unsaved:
            whole[name] = buffer.clone()
    return whole


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so that NaN equals itself and -0.0 is not 0.0)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def unlike(what: str, found: Any, expected: Any) -> list[str]:
    """One line if two plain values differ; for mappings, with only the entries that do."""
    if found == expected:
        return []
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = [key for key in {**expected, **found} if found.get(key, ...) != expected.get(key, ...)]
        found, expected = {k: found.get(k) for k in keys}, {k: expected.get(k) for k in keys}
    return [f"{what}: found {found}, expected {expected}"]


def _gathered(parameter: nn.Parameter, engine: str) -> torch.Tensor:
    if engine == "deepspeed":
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.full_tensor().detach().clone()  # type: ignore[operator]  # a DTensor


def _compare(
    what: str, found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    lines = [f"{what}: {name} is missing" for name in expected.keys() - found.keys()]
    lines += [f"{what}: {name} is not in the reference" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        got, want = found[name], expected[name]
        if got is None:
            lines.append(f"{what}: {name} is None")
        elif got.dtype != want.dtype or got.shape != want.shape:
            lines.append(
                f"{what}: {name} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
            )
        elif got.device != want.device:
            lines.append(f"{what}: {name} is on {got.device}, not on {want.device}")
        elif not same_bits(got, want):
            wrong = int((got != want).sum())
            lines.append(f"{what}: {name} has {wrong} of {want.numel()} elements wrong")
    return sorted(lines)


def _counts(pairs: list[tuple[str, Any]]) -> list[tuple[str, int]]:
    names = [name for name, _ in pairs]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _unsaved(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                found[f"{path}.{name}".lstrip(".")] = buffer.clone()
    return found


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the attributes of modules, in lists, tuples and dicts as well."""
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
    # A transformers configuration, or a mapping as diffusers has it.
    plain: dict[str, Any] = dict(config) if isinstance(config, Mapping) else config.to_dict()
    # Quantizers of older releases write plans for the scales there, even where they then dequantise.
    plain = {key: value for key, value in plain.items() if key not in PLANS}
    return plain | {
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
    }


def _partitions(model: nn.Module) -> list[str]:
    """ZeRO-3's own invariants: partition size, zeroed padding, freed parameter, one numbering everywhere."""
    lines = []
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, p in model.named_parameters():
        part: torch.Tensor = p.ds_tensor  # type: ignore[assignment]
        size = -(-p.ds_numel // world)  # type: ignore[operator]
        if part.dim() != 1 or part.numel() != size:
            lines.append(f"partition of {name} has shape {tuple(part.shape)}, not ({size},)")
        own = min(max(p.ds_numel - rank * size, 0), size)  # type: ignore[operator]
        if part[own:].contiguous().view(torch.uint8).any():
            lines.append(f"partition of {name}: the padding after element {own} is not zero")
        if p.numel() != 0:
            lines.append(f"{name} still holds {p.numel()} elements")
        if part.requires_grad:
            lines.append(f"partition of {name} requires grad")
    numbers: list[Any] = [None] * world
    dist.all_gather_object(numbers, [(name, p.ds_id) for name, p in model.named_parameters()])
    return lines + [f"ds_id differs on rank {r}" for r in range(world) if numbers[r] != numbers[0]]


def _shards(model: nn.Module) -> list[str]:
    """Each parameter is a DTensor with the rows that torch gives to this rank, over storage of that size."""
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
