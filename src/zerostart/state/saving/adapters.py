"""Save PEFT's adapters as files, or merge them into shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.distributed.world import current_world
from zerostart.engines import Shard, whole_shard
from zerostart.engines.shard import plain_name
from zerostart.errors import ConfigError
from zerostart.geometry import Piece, simplify
from zerostart.geometry.layout import Layout
from zerostart.live.full_tensors import gather_tensor
from zerostart.live.model import LogicalTensor, find_loaded_parts, inner_module
from zerostart.recipe import Recipe, Target, spelling
from zerostart.state.saving.contents import Contents
from zerostart.state.saving.writing import Outgoing, describe_share


@dataclass(frozen=True)
class AdapterFormat:
    """The format of an adapter's file; by default PEFT's."""

    #: Name of the file without its suffix.
    stem: str = "adapter_model"
    #: Renames tensors from PEFT's names (``blocks.0.to_q.lora_A.weight``).
    renamed: Callable[[str], str] = str
    #: True if names keep PEFT's ``base_model.model.``.
    prefixed: bool = True
    #: Returns the metadata of the file from PEFT's configuration.
    metadata: Callable[[Any], dict[str, str] | None] = lambda config: None
    #: True if PEFT's configuration is written next to the file.
    configured: bool = True
    #: True if factors of experts are stored one by one, under the names of the checkpoint's experts.
    per_expert: bool = False
    #: True if the second factor includes the scale, which the file does not record.
    folded: bool = False


#: The format of PEFT's ``save_pretrained``.
PEFT_FORMAT = AdapterFormat()
#: Prefix of names in PEFT's files and in a ``PeftModel``.
PEFT_PREFIX = "base_model.model."
#: PEFT's classes: layers with adapters, which hold their base layers, and modules of ``modules_to_save``.
_LAYER, _REPLACEMENT = "BaseTunerLayer", "ModulesToSaveWrapper"


@dataclass(frozen=True)
class Adapted:
    """A model with ``peft_config``; ``prefix`` starts its names in PEFT's files."""

    model: Any
    prefix: str

    @property
    def peft_config(self) -> dict[str, Any]:
        """PEFT's configurations by the adapters' names."""
        return dict(self.model.peft_config)

    def save_config(self, adapter: str, directory: Path, per_expert: bool) -> None:
        base: Any = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        config = copy.deepcopy(self.peft_config[adapter])
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
        config.inference_mode = True
        if per_expert:
            parts = (part for parts in _find_projections(self.model).values() for part in parts)
            names = {part.experts[0].rpartition(".")[2] for part in parts}
            config.target_parameters = None
            if not isinstance(config.target_modules, str):  # a pattern, which engines do not read
                config.target_modules = names.union(config.target_modules or ())
        mapping = None
        if config.task_type is None:
            mapping = {
                "base_model_class": type(base).__name__.removeprefix("FSDP"),
                "parent_library": type(base).__module__,
            }
        config.save_pretrained(directory, auto_mapping_dict=mapping)


def find_adapted_model(model: nn.Module, within: bool = False) -> Adapted | None:
    """Find the model with adapters: ``model`` or one that it wraps.

    With ``within`` it may also be a submodule.
    Raises ConfigError if several submodules have adapters.
    """
    inner: nn.Module | None = model
    while inner is not None:
        if _is_adapted(inner):
            return _make_adapted(inner)
        inner = inner_module(inner)
    outermost = _find_outermost(model) if within else {}
    if len(outermost) > 1:
        raise ConfigError(
            f"several models in this {type(model).__name__} have adapters ({', '.join(sorted(outermost))}): "
            "save each of them by itself"
        )
    return next(map(_make_adapted, outermost.values()), None)


def _is_adapted(model: nn.Module) -> bool:
    # DeepSpeed's engine and torch.compile's modules forward attributes of the inner model.
    own = "peft_config" in vars(model) or hasattr(type(model), "peft_config")
    return own and bool(model.peft_config)


def _make_adapted(model: nn.Module) -> Adapted:
    return Adapted(model, "" if hasattr(model, "get_base_model") else PEFT_PREFIX)


def _find_outermost(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the outermost models with adapters below ``model``, by name."""
    if _is_adapted(model):
        return {name: model}
    below = (_find_outermost(part, f"{name}.{own}".lstrip(".")) for own, part in model.named_children())
    return {name: part for parts in below for name, part in parts.items()}


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT wraps any module of ``model``."""
    return any(any(_find_instances(model, kind)) for kind in (_LAYER, _REPLACEMENT))


def _find_instances(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules of PEFT's class ``kind``, without importing PEFT."""
    for name, module in model.named_modules():
        if any(
            base.__name__ == kind and base.__module__.startswith("peft.") for base in type(module).__mro__
        ):
            yield name, module


@dataclass(frozen=True)
class AdapterFile:
    """The file of one adapter."""

    name: str
    contents: Contents
    metadata: Mapping[str, str] | None

    @property
    def folder(self) -> str:
        """Folder of the file; PEFT writes the adapter "default" at the top."""
        return "." if self.name == "default" else self.name


def list_adapter_files(
    adapted: Adapted,
    shards: Mapping[int, Shard],
    dtype: torch.dtype | None,
    written_as: AdapterFormat,
) -> list[AdapterFile]:
    """Return the files of all adapters; ``shards`` maps ids of tensors to shards.

    Raises ConfigError for an adapter whose file has computed tensors, and for a scale without an entry.
    """
    return [
        AdapterFile(
            adapter,
            _describe_contents(adapted, adapter, shards, dtype, written_as),
            written_as.metadata(adapted.peft_config[adapter]),
        )
        for adapter in adapted.peft_config
    ]


def _describe_contents(
    adapted: Adapted,
    adapter: str,
    shards: Mapping[int, Shard],
    dtype: torch.dtype | None,
    written_as: AdapterFormat,
) -> Contents:
    from peft.utils import get_peft_model_state_dict

    # PEFT chooses and names the tensors of its file. It gets full-size tensors on the meta device, whose
    # identities find their shards.
    twins: dict[str, torch.Tensor] = {}
    by_twin: dict[int, Shard] = {}
    for name, tensor in adapted.model.state_dict(keep_vars=True).items():
        shard = shards.get(id(tensor))
        if shard is not None:
            layout = shard.layout
            twins[name] = torch.empty(layout.shape, dtype=shard.storage.dtype, device="meta")
            by_twin[id(twins[name])] = shard
    chosen = get_peft_model_state_dict(adapted.model, state_dict=twins, adapter_name=adapter)
    config = adapted.peft_config[adapter]
    chosen_shards: dict[str, Shard] = {}
    for name, twin in chosen.items():
        shard = by_twin.get(id(twin))
        if shard is None and config.is_prompt_learning:
            # PEFT has run the prompt encoder, whose hooks gather its parameters: every rank has the result.
            shard = whole_shard(name, twin, current_world())
        if shard is None:
            raise ConfigError(
                f"the adapter {adapter!r} ({config.peft_type}) computes {name} when it is saved, and no "
                "rank holds that; use PEFT's save_pretrained on the gathered model"
            )
        chosen_shards[adapted.prefix + name] = shard
    if written_as.per_expert and any(getattr(config, f"{key}_pattern", None) for key in ("rank", "alpha")):
        raise ConfigError(
            f"per_expert=True cannot save the adapter {adapter!r}: engines ignore rank_pattern and "
            "alpha_pattern, and scale by r and lora_alpha; leave per_expert out, or use merge_adapters=True"
        )
    contents = Contents()
    projections = _find_projections(adapted.model) if written_as.per_expert else {}
    # Scale only one factor of the product.
    times = _uniform_scale(config, adapter) if written_as.folded else 1.0
    for name, shard in chosen_shards.items():
        if written_as.folded and not name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise ConfigError(
                f"the adapter {adapter!r} has {name}, which is no factor of a LoRA, and this format has no "
                "other entries; save it in PEFT's format"
            )
        stored = written_as.renamed(name if written_as.prefixed else name.removeprefix(PEFT_PREFIX))
        layer = name.removeprefix(adapted.prefix).rpartition(".lora_")[0]
        for projection in projections.get(layer, ()):
            _add_projection(contents, projection, name, shard, dtype or shard.storage.dtype)
        if layer in projections:
            continue
        floating = dtype is not None and shard.storage.dtype.is_floating_point
        stored_dtype = dtype if floating and dtype is not None else shard.storage.dtype
        contents.entries.append((stored, spelling(stored_dtype), shard.layout.shape))
        outgoing = describe_share(stored, shard, stored_dtype)
        if times != 1.0 and ".lora_B." in name:
            outgoing = replace(outgoing, change=lambda _, data: (data.float() * times).to(data.dtype))
        contents.outgoing.append(outgoing)
    return contents


@dataclass(frozen=True)
class _Projection:
    """A part of a parameter of experts that the checkpoint stores for each expert."""

    #: Names of the experts' modules in the checkpoint.
    experts: tuple[str, ...]
    #: First output of the part in the parameter, and number of outputs.
    first: int
    count: int


def _find_projections(model: nn.Module) -> dict[str, list[_Projection]]:
    """Return the projections in each experts' parameter with adapters.

    Keys are paths of PEFT's layers. Raises ConfigError for a checkpoint that stores all experts together.
    """
    projections = {}
    for prefix, part, record in find_loaded_parts(model):
        for path, layer in _find_instances(part, _LAYER):
            name = plain_name(f"{path}.{getattr(layer, 'parameter_name', '')}")
            recipe = record.recipes.get(name)
            if recipe is None or len(recipe.target.shape) != 3:
                continue
            experts = recipe.target.shape[0]
            if any(
                len(piece.source) != experts or piece.extent[2] != recipe.target.shape[2]
                for piece in recipe.pieces
            ):
                raise ConfigError(
                    f"{name} has no names for single experts in the checkpoint, so its adapters have none; "
                    "leave per_expert out: engines load PEFT's format for this model"
                )
            projections[prefix + path] = [
                _Projection(
                    tuple(str(source).removesuffix(".weight") for source in piece.source),
                    piece.origin[1],
                    piece.extent[1],
                )
                for piece in recipe.pieces
            ]
    return projections


def _add_projection(
    contents: Contents, projection: _Projection, name: str, shard: Shard, dtype: torch.dtype
) -> None:
    """Add the tensors of all experts from the factor ``name`` of all outputs."""
    factor, experts = name.rpartition(".lora_")[2], projection.experts
    files = tuple(f"{PEFT_PREFIX}{expert}.lora_{factor}" for expert in experts)
    rows, columns = shard.layout.shape
    if factor.startswith("A"):
        shape = rows // len(experts), columns
        unit = prod(shape)
        axes = simplify(((len(experts), unit), (shape[0], columns)), unit), simplify(((columns, 1),))
        piece = Piece((0, 0), axes, files, unit, 0)
    else:
        shape = projection.count, columns // len(experts)
        unit = prod(shape)
        axes = simplify((shape,)), simplify(((shape[1], 1), (len(experts), unit)), unit)
        piece = Piece((projection.first, 0), axes, files, unit, 0)
    contents.entries += [(file, spelling(dtype), shape) for file in files]
    contents.outgoing.append(Outgoing(Recipe(Target(name, shard.layout.shape, dtype), (piece,)), shard))


def _uniform_scale(config: Any, adapter: str) -> float:
    """Return the scale of the products of factors; raises ConfigError if modules have several."""
    settings = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    if not hasattr(config, "lora_alpha") or any(getattr(config, key, None) for key in settings):
        raise ConfigError(
            f"the adapter {adapter!r} (no LoRA, DoRA, or another scaling in each module) cannot be saved in "
            "this format, which has no entry for that; save it in PEFT's format"
        )
    return float(config.lora_alpha) / float(config.r)


def merge_into_weights(model: nn.Module, tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """Return ``tensors`` with all adapters merged, as by ``merge_and_unload``; collective.

    The factors are whole on every rank; their product is computed for the rows that are being written. Raises
    ConfigError for adapters that are not LoRA's.
    """
    by_name = {item.current_name: item for item in tensors}
    adapter_tensors: set[str] = set()
    changed: dict[str, LogicalTensor] = {}
    for name, layer in _find_instances(model, _LAYER):
        own = f"{name}."
        # Tensors of the adapter are not saved: they are merged into the base layer's weight.
        adapter_tensors |= {n for n in by_name if n.startswith(own) and not n.startswith(f"{own}base_layer.")}
        base, inner = f"{name}.base_layer", layer.base_layer
        while hasattr(inner, "base_layer"):  # each parameter of experts has a layer around them
            base, inner = f"{base}.base_layer", inner.base_layer
        item = by_name.get(f"{base}.{getattr(layer, 'parameter_name', 'weight')}")
        # Each delta gathers its factors: ranks have the same layers and adapters in the same order.
        deltas = [_make_delta(name, layer, adapter, by_name, item) for adapter in _unmerged_adapters(layer)]
        if deltas and item is None:
            raise ConfigError(f"{name}: an adapter of this kind cannot be merged; use adapters_only=True")
        if item is not None and deltas:
            changed[item.current_name] = replace(item, change=_Merge(tuple(deltas), item.shard.layout))
    for name, module in _find_instances(model, _REPLACEMENT):
        if len(module.active_adapters) != 1:
            raise ConfigError(f"{name} has {module.active_adapters} active; activate one to merge")
        trained = f"{name}.modules_to_save.{module.active_adapters[0]}."
        for current, item in by_name.items():
            if current.startswith(trained):
                changed[current] = replace(item, name=f"{name}.{current.removeprefix(trained)}")
            elif current.startswith(f"{name}."):
                adapter_tensors.add(current)
    return [changed.get(t.current_name, t) for t in tensors if t.current_name not in adapter_tensors]


def _unmerged_adapters(layer: Any) -> list[str]:
    """Return the active adapters of a layer that are not merged yet."""
    return [a for a in layer.active_adapters if a not in layer.merged_adapters and _factor_names(layer, a)]


def _factor_names(layer: object, adapter: str) -> tuple[str, str] | None:
    """Return the names of a layer's factors A and B, or None."""
    if adapter in getattr(layer, "lora_A", {}):
        return f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"
    if adapter in getattr(layer, "lora_embedding_A", {}):
        return f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"
    if hasattr(layer, "lora_A"):
        return None
    raise ConfigError(
        f"a {type(layer).__name__} is no LoRA layer and cannot be merged shard by shard; use "
        "adapters_only=True"
    )


@dataclass(frozen=True)
class _Delta:
    """The product ``b @ a`` times ``scaling``; transposed if ``turned``."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    turned: bool
    dtype: torch.dtype

    #: Number of experts whose products follow each other.
    experts: int = 1

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """Return rows ``first`` to ``stop``, as PEFT computes them."""
        count = self.a.shape[1] if self.turned else self.b.shape[0]
        factors: Any = self.a  # whose method has no types
        parts = []
        for expert in range(first // count, -(-stop // count)):
            low, high = max(first - expert * count, 0), min(stop - expert * count, count)
            # The rows of A are sorted by expert; the columns of B begin again with the first expert.
            a = factors.unflatten(0, (self.experts, -1))[expert]
            b = self.b[:, expert :: self.experts]
            parts.append((b @ a[:, low:high]).T if self.turned else b[low:high] @ a)
        return (torch.cat(parts) * self.scaling).to(self.dtype)


def _make_delta(
    name: str, layer: Any, adapter: str, tensors: Mapping[str, LogicalTensor], item: LogicalTensor | None
) -> _Delta:
    variant = adapter in getattr(layer, "lora_variant", {}) or layer.lora_bias.get(adapter, False)
    factor_names = _factor_names(layer, adapter)
    factors = [tensors.get(f"{name}.{factor}") for factor in factor_names or ()]
    if variant or len(factors) != 2 or any(f is None or len(f.shard.layout.shape) != 2 for f in factors):
        raise ConfigError(
            f"{name}: the adapter {adapter!r} (DoRA, a bias, or a convolution) cannot be merged shard by "
            "shard; use adapters_only=True"
        )
    a, b = (_gather(factor) for factor in factors if factor is not None)
    embedding = "embedding" in (factor_names or ("",))[0]
    turned = bool(getattr(layer, "fan_in_fan_out", False)) or embedding
    dtype, experts = b.dtype, 1
    if item is not None and (embedding or hasattr(layer, "parameter_name")):
        dtype = item.shard.storage.dtype  # PEFT casts the product before it adds it.
        if len(item.shard.layout.shape) == 3:
            experts = item.shard.layout.shape[0]
            turned = bool(getattr(layer.get_base_layer(), "is_transposed", False))
    if b.dtype in (torch.float16, torch.bfloat16):  # as PEFT does on the CPU
        a, b = a.float(), b.float()
    return _Delta(a, b, float(layer.scaling[adapter]), turned, dtype, experts)


def _gather(factor: LogicalTensor) -> torch.Tensor:
    shard = factor.shard
    boxes, storage = shard.layout.boxes, shard.storage.detach()
    # A replica that this rank holds whole needs no collective.
    if shard.replica[1] > 1 and [placed.box.numel for placed in boxes] == [prod(shard.layout.shape)]:
        (placed,) = boxes
        at = int(storage.storage_offset()) + placed.to
        return storage.as_strided(shard.layout.shape, placed.strides, at).cpu()
    whole = gather_tensor(shard, None)
    assert whole is not None, "every rank asked for it"
    return whole


class _Merge:
    """Adds products to the elements of a shard."""

    def __init__(self, deltas: tuple[_Delta, ...], layout: Layout) -> None:
        self._deltas = deltas
        self._columns = layout.shape[-1]
        self._runs = layout.runs()

    def __call__(self, first: int, data: torch.Tensor) -> torch.Tensor:
        changed = data.detach().to("cpu", copy=True)
        for start, count, place in self._runs:
            low, high = max(place, first), min(place + count, first + changed.numel())
            if low < high:
                self._add(changed[low - first : high - first], start + low - place)
        return changed

    def _add(self, elements: torch.Tensor, at: int) -> None:
        """Add the products to ``elements``, which begin at row-major element ``at`` of the weight."""
        # A run may begin within a row: compute whole rows of the product, and skip ``column`` elements.
        row, column = divmod(at, self._columns)
        stop = -(-(at + elements.numel()) // self._columns)
        for delta in self._deltas:
            flat = delta.rows(row, stop).reshape(-1)
            elements += flat[column : column + elements.numel()]
