"""Models of diffusers, built from their configuration as ``from_pretrained`` does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.base import CONFIG_NAME
from zerostart.checkpoint.source import config_path, read_config
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.errors import BuildError, ConversionError, UnsupportedVersionError
from zerostart.models.aliases import state_names
from zerostart.models.library import BuildRequest, Built, Construction, ModelLibrary, OwnLoading
from zerostart.recipe import (
    Recipes,
    SymbolicTensor,
    Target,
    dequantise_symbols,
    find_leaves,
    match_names,
    run_converter,
)
from zerostart.upstream.diffusers import weights as upstream
from zerostart.upstream.diffusers.weights import fix_names, model_class, original_layout, require_version
from zerostart.upstream.guard import Function
from zerostart.upstream.transformers.models import without_bars

if TYPE_CHECKING:
    from diffusers import ModelMixin


class Diffusers(ModelLibrary):
    """diffusers; constructors initialise missing tensors."""

    name = "diffusers"
    weights_stem = "diffusion_pytorch_model"
    adapter_format = "diffusers"

    def handles(self, kind: type) -> bool:
        return upstream.is_diffusers(kind)

    def describes(self, root: str | None) -> bool:
        """Return True for a ``_class_name``, which only diffusers writes."""
        config = (read_config(root) if root else None) or {}
        return isinstance(config.get("_class_name"), str)

    def configuration_of(
        self, shapes: Mapping[str, tuple[int, ...]], kind: type[nn.Module] | None = None
    ) -> JsonObject | None:
        """Find the configuration of the tensors' release, as ``from_single_file`` does.

        It has to be in the local cache of the hub; otherwise BuildError is raised.
        """
        from huggingface_hub import try_to_load_from_cache

        try:
            release = upstream.original_release(shapes)
        except UnsupportedVersionError:
            return None
        if release is None:
            return None
        repository, folder = release
        own = None if kind is None else upstream.component_folder(kind)
        folders = [own or folder] if kind is not None or folder is not None else ["transformer", "unet"]
        for one in folders:
            name = f"{one}/{CONFIG_NAME}" if one else CONFIG_NAME
            if isinstance(path := try_to_load_from_cache(repository, name), str):
                return read_config(Path(path).parent)
        files = " or ".join(f"{one}/{CONFIG_NAME}" if one else CONFIG_NAME for one in folders)
        raise BuildError(
            f"there is no {CONFIG_NAME} next to the file; by its tensors diffusers takes that of "
            f"{repository}, which is not in the local cache. Download it (hf download {repository} {files}), "
            "put the one of your model next to the file, or pass model=lambda: Class(...)"
        )

    def import_code(self, kind: type[nn.Module] | None, root: str | None) -> None:
        """Import diffusers and the class in the configuration.

        Raises BuildError or UnsupportedVersionError.
        """
        if kind is None:
            _find_class(read_config(str(root)) or {}, str(root))

    def construction(self, kind: type[nn.Module] | None, request: BuildRequest) -> Construction:
        """Build in the final dtype, since buffers depend on it.

        Raises BuildError for a class that diffusers does not have.
        """
        config = read_config(request.root) if request.root else None
        if config is None:
            config = self.configuration_of(request.shapes, kind)
        chosen = _find_class(config or {}, str(request.root)) if kind is None else kind
        building = _choose_floating(request.dtype or request.main_dtype)
        return Construction(
            chosen.__name__, lambda: _construct(chosen, request.root, config), building, request.dtype
        )

    def expectations(self, built: Built) -> dict[str, Target]:
        """Cast as ``ModelMixin.from_pretrained``: some modules stay in float32.

        Without a dtype, the others keep the checkpoint's.
        """
        # Names of modules, which keep all their tensors.
        fp32_modules = upstream.kept_in_fp32(built.model)
        targets: dict[str, Target] = {}
        for name, tensor, buffer in state_names(built.model):
            dtype, as_stored = tensor.dtype, False
            if dtype.is_floating_point:
                if not fp32_modules.isdisjoint(name.split(".")):
                    dtype = torch.float32
                elif built.dtype is None:
                    as_stored = True
                else:
                    dtype = built.dtype
            targets[name] = Target(name, tuple(tensor.shape), dtype, buffer, as_stored)
        return targets

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: object = None
    ) -> Recipes:
        """Use the checkpoint layout that fits, or a callable."""
        if converter is not None:
            return super().recipes(built, catalog, targets, converter)
        reading = convert(built.model, dequantise_symbols(catalog, targets), targets)
        return match_names(reading.tensors, targets, reading.foreign, reading.dropped)

    def ignorable(self, model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), upstream.ignorable_unexpected(model)

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        """Store the name in the configuration, as ``from_pretrained`` does."""
        model: ModelMixin = built.model
        if name is not None and name not in catalog.files:
            model.register_to_config(_name_or_path=name)

    def save_settings(self, model: nn.Module, directory: Path, dtype: torch.dtype | None) -> bool:
        """Write the configuration, without FSDP2's prefix of the class name."""
        described: ModelMixin = model
        described.save_config(directory)
        path = directory / CONFIG_NAME
        written = json.loads(path.read_text(encoding="utf-8"))
        # FSDP2 prefixes the class name with ``FSDP``.
        written["_class_name"] = type(model).__name__.removeprefix("FSDP")
        path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return True

    def own_loading(self, kind: type[nn.Module]) -> OwnLoading | None:
        """Return ``from_pretrained`` of the library's own class."""
        plain: type[ModelMixin] = next(k for k in kind.__mro__ if k.__module__.startswith("diffusers."))

        def load(root: str, dtype: torch.dtype | None) -> nn.Module:
            with without_bars("diffusers"):
                loaded: nn.Module = plain.from_pretrained(root, torch_dtype=dtype)
            return loaded

        return load


def _choose_floating(dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and dtype.itemsize > 1 else torch.get_default_dtype()


def _find_class(config: Mapping[str, object], root: str) -> type[nn.Module]:
    """Return the class of a configuration. Raises BuildError without one."""
    require_version()
    name = str(config.get("_class_name"))
    kind = model_class(name)
    if kind is None:
        import diffusers

        raise BuildError(
            f"{Path(root) / CONFIG_NAME} names the class {name}, which is not a model of diffusers "
            f"{diffusers.__version__}; pass model= with the class or a callable that builds it"
        )
    return kind


def _construct(kind: type[ModelMixin], root: str | None, config: JsonObject | None) -> nn.Module:
    """Build the class from a configuration.

    Raises BuildError without a configuration, or if it describes no class of diffusers.
    """
    if config is None:
        raise BuildError(
            f"{root} has no {CONFIG_NAME} to build {kind.__name__} from. Put the configuration of "
            f"the diffusers model next to the file, or pass model=lambda: {kind.__name__}(...)"
        )
    _check_described(config, kind, Path(str(root)) / CONFIG_NAME)
    has_file = root is not None and config_path(root) is not None
    model: nn.Module = kind.from_config(kind.load_config(root) if has_file else dict(config))
    return model


def _check_described(config: Mapping[str, object], kind: type, path: Path) -> None:
    name = config.get("_class_name")
    bases = {base.__name__ for base in kind.__mro__}
    if name is not None and name not in bases and model_class(str(name)) is None:
        raise BuildError(
            f"{path} describes the class {name}, which diffusers does not have: it is the "
            f"configuration of the original release. Pass model=lambda: {kind.__name__}(...), or "
            "put the diffusers configuration there"
        )


Symbols = Mapping[str, SymbolicTensor]
_STATISTICS = r"per_channel_statistics\.(channel|mean-of-means|mean-of-stds)"
#: Names that a converter of diffusers drops, since the model does not have them.
_DROPPED = {
    "convert_cosmos_transformer_checkpoint_to_diffusers": r"logvar\.|pos_embedder\.|accum_|_extra_state",
    "convert_flux3_transformer_checkpoint_to_diffusers": r"^repa_projectors\.",
    "convert_ltx2_transformer_to_diffusers": r"(video|audio)_embeddings_connector",
    "convert_ltx2_vae_to_diffusers": _STATISTICS,
    "convert_ltx_vae_checkpoint_to_diffusers": _STATISTICS,
    "convert_minimax_h3_transformer_checkpoint_to_diffusers": r"^rope\.inv_freq$",
    "convert_sana_transformer_to_diffusers": r"^(y_embedder\.y_embedding|pos_embed)$",
    "convert_z_image_transformer_checkpoint_to_diffusers": r"norm_final\.weight$",
}


# A file has the model's names or those of the original release, for which diffusers has a converter. Both may
# have a prefix, next to other components. Each reading is tried on symbolic tensors, and the first one that
# covers most of the model is used. So a missing tensor is not mistaken for another layout.
@dataclass(frozen=True)
class Reading:
    """Tensors by the model's names, and checkpoint names of other components."""

    tensors: dict[str, SymbolicTensor]
    foreign: tuple[str, ...] = ()
    #: Checkpoint names that the converter drops.
    dropped: tuple[str, ...] = ()


def convert(model: object, symbols: Symbols, targets: Mapping[str, Target]) -> Reading:
    """Return the reading of ``symbols`` that covers most of ``targets``.

    Raises ConversionError if the converter fails and the names are not the model's own.
    """
    # The plainest reading comes first, and the first of equals counts.
    best, most = Reading({}), -1
    failure: ConversionError | None = None
    for read in _list_readings(model, symbols):
        try:
            reading = read()
        except ConversionError as error:  # the converter looks up keys of another layout
            failure = failure or error
            continue
        covered = sum(
            name in reading.tensors and tuple(reading.tensors[name].shape) == target.shape
            for name, target in targets.items()
        )
        if covered > most:
            best, most = reading, covered
        if covered == len(targets):
            break
    # If most names fit, report missing tensors instead of another layout.
    if failure is not None and 2 * most < len(targets):
        raise ConversionError(
            f"the checkpoint has only {most} of the {len(targets)} tensors of "
            f"{type(model).__name__}, and it is not in the original layout that diffusers "
            f"converts: {failure}"
        ) from failure
    return best


def _list_readings(model: object, symbols: Symbols) -> Iterator[Callable[[], Reading]]:
    def read_plain(part: Symbols, foreign: tuple[str, ...] = ()) -> Reading:
        tensors = dict(part)
        fix_names(model, tensors)
        return Reading(tensors, foreign)

    yield lambda: read_plain(symbols)
    converter, prefixes = original_layout(type(model))
    part, stripped, foreign = _split_component(symbols, prefixes)
    if stripped is not None:
        yield lambda: read_plain(stripped, foreign)
    if converter is not None:
        yield lambda: _convert_part(converter, model, part, foreign)
        if stripped is not None:
            yield lambda: _convert_part(converter, model, stripped, foreign)


def _split_component(
    symbols: Symbols, prefixes: tuple[str, ...]
) -> tuple[Symbols, Symbols | None, tuple[str, ...]]:
    """Return the component's tensors, with and without their prefix, and others."""
    # As in diffusers, the last matching prefix counts.
    prefix = next((p for p in reversed(prefixes) if any(name.startswith(p) for name in symbols)), None)
    if prefix is None:
        return symbols, None, ()
    part = {name: tensor for name, tensor in symbols.items() if name.startswith(prefix)}
    stripped = {name.removeprefix(prefix): tensor for name, tensor in part.items()}
    return part, stripped, tuple(name for name in symbols if name not in part)


def _convert_part(converter: Function, model: ModelMixin, part: Symbols, foreign: tuple[str, ...]) -> Reading:
    def convert(state_dict: JsonObject) -> JsonObject:
        converted = converter(config=dict(model.config), checkpoint=state_dict)
        # Converters that use `get` leave None for missing keys.
        return {name: value for name, value in converted.items() if value is not None}

    name = getattr(converter, "__name__", "of diffusers")
    tensors = run_converter(convert, part, name)
    used = {source for tensor in tensors.values() for source in find_leaves(tensor.value.pieces)}
    may_drop = _DROPPED.get(name, "(?!)")
    dropped = {
        source
        for key, tensor in part.items()
        for source in find_leaves(tensor.value.pieces)
        if source not in used and not re.search(may_drop, key)
    }
    return Reading(tensors, foreign, tuple(sorted(dropped)))
