"""Models of transformers, built, tied and initialised as in ``from_pretrained``."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.source import read_config
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.errors import BuildError, CheckpointError, ConversionError
from zerostart.models.aliases import state_names
from zerostart.models.library import Attention, BuildRequest, Built, Construction, ModelLibrary, OwnLoading
from zerostart.recipe import (
    CheckpointSymbols,
    Coverage,
    Recipes,
    SymbolicTensor,
    Target,
    assemble_recipes,
    dequantise_symbols,
    snapshot,
    trace_call,
)
from zerostart.upstream.transformers import attention as attention_parts
from zerostart.upstream.transformers import models as upstream
from zerostart.upstream.transformers.models import (
    checkpoint_class,
    is_configuration,
    loading_core,
    refuse_questions,
    without_bars,
)
from zerostart.upstream.transformers.quantizers import dequantizer, method_of, prepare

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform

logger = logging.getLogger("zerostart")
#: Checkpoint tensors of one run of a converter, with the pattern that each matches.
_Members = list[tuple[str, str]]
_CODE = (
    "the model's class is code that lies beside the checkpoint (auto_map), of which nothing was run. If you "
    "trust where it comes from, pass trust_remote_code=True (--trust-remote-code); or pass model= with the "
    "class or a callable that builds it"
)


class Transformers(ModelLibrary):
    """transformers, with its rules for names, ties and dtypes."""

    name = "transformers"

    def handles(self, kind: type) -> bool:
        return upstream.is_pretrained(kind)

    def describes(self, root: str | None) -> bool:
        """Accept any configuration: this library is asked last."""
        return True

    def import_code(self, kind: type[nn.Module] | None, root: str | None) -> None:
        """Import transformers and the configuration's class. Raises BuildError without one."""
        import transformers

        raw = _read_config(root) if kind is None else {}
        if "auto_map" in raw:
            return  # code next to the weights, which the caller has to trust: see ``construction``
        named = raw.get("architectures")
        names = named if isinstance(named, list) else ()
        classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
        if kind is None and not any(isinstance(one, type) for one in classes):
            _find_class_and_config(root, kind)

    def construction(self, kind: type[nn.Module] | None, request: BuildRequest) -> Construction:
        """Build in the requested, the configuration's or the checkpoint's dtype.

        Raises BuildError for a configuration that names no class.
        """
        made, config = _find_class_and_config(request.root, kind, request.trust_remote_code)
        dtype = request.dtype or _parse_dtype(getattr(config, "dtype", None)) or request.first_dtype
        chosen = dtype or torch.get_default_dtype()
        return Construction(made.__name__, lambda: made(_set_dtype(config, chosen)), chosen, chosen)

    def of_configuration(
        self, config: object, dtype: torch.dtype | None
    ) -> tuple[Callable[[], nn.Module], torch.dtype | None] | None:
        """Use the configuration's first class, or the base model.

        Raises BuildError.
        """
        if not is_configuration(config):
            return None
        own = copy.deepcopy(config)
        made, named = _find_class(own), dtype or _parse_dtype(getattr(own, "dtype", None))
        return functools.partial(made, own if named is None else _set_dtype(own, named)), named

    def whole_dtype(self, model: nn.Module, request: BuildRequest, is_module: bool) -> torch.dtype | None:
        """Use the requested dtype, else the configuration's, else the checkpoint's.

        Raises BuildError for a file that is no configuration.
        """
        config: PreTrainedConfig = model.config
        if is_module:
            path = Path(request.root or "") / "config.json"
            named = _read_config(request.root) if request.root and path.is_file() else {}
            own = _parse_dtype(named.get("dtype") or named.get("torch_dtype"))
        else:
            own = _parse_dtype(getattr(config, "dtype", None))
        return request.dtype or own or request.first_dtype

    def quantizer(self, model: nn.Module, root: str | None, dtype: torch.dtype | None) -> object:
        """Return the quantizer for the configuration next to the weights.

        Raises BuildError for a file that is no configuration, ConversionError for an unknown format.
        """
        if not root or not (Path(root) / "config.json").is_file():
            return None
        quantization = _read_config(root).get("quantization_config")
        if quantization is None:
            return None
        quantizer = dequantizer(quantization, root)
        prepare(quantizer, model, dtype or torch.get_default_dtype())
        return quantizer

    def quantisation(self, quantizer: object) -> str:
        return method_of(quantizer)

    def dtype_plan(self, model: nn.Module, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
        return upstream.dtype_plan(model, dtype)

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: Any = None
    ) -> Recipes:
        """Use registered conversions, a list of conversions, or a callable."""
        if callable(converter):
            return super().recipes(built, catalog, targets, converter)
        mapping = (
            upstream.registered_conversions(built.model, built.quantizer)
            if converter is None
            else list(converter)
        )
        plain = converter is None and built.quantizer is None
        symbols = dequantise_symbols(catalog, targets) if plain else CheckpointSymbols(catalog)
        return convert(built.model, mapping, symbols, targets)

    def revert(self, model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return upstream.revert(model, state_dict)

    def ties(self, model: nn.Module) -> dict[str, str]:
        return upstream.tied_names(model)

    def tie(self, model: nn.Module, missing: set[str]) -> None:
        upstream.tie(model, missing)

    def untie(self, model: nn.Module, name: str, source: str) -> None:
        """Separate the names, and remove the tie from the model."""
        del upstream.tied_names(model)[name]
        super().untie(model, name, source)

    def lacking(self, model: nn.Module, coverage: Coverage) -> Iterable[str]:
        """Yield every name, since ignored mismatches are initialised."""
        return (name for name, _, _ in state_names(model))

    def ignorable(self, model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return upstream.ignorable(model)

    def mark_loaded(self, tensor: torch.Tensor) -> None:
        upstream.mark_loaded(tensor)

    def initialiser(self, model: nn.Module) -> Callable[[], None] | None:
        return functools.partial(upstream.initialise, model)

    def keep_outputs(self, model: nn.Module) -> None:
        """Keep outputs that transformers finds by class name."""
        upstream.keep_outputs(model)

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        """Set attributes that later library calls read.

        These are the conversions that matched (``save_pretrained`` reverses them), the name and dtype in the
        configuration, and the generation configuration.
        """
        model: PreTrainedModel = built.model
        upstream.keep_conversions(model, recipes.conversions)
        model.config.name_or_path = model.config.name_or_path if name is None else name
        if built.dtype is not None:
            model.config.dtype = built.dtype
        root = catalog.root
        path = Path(root or "") / "generation_config.json"
        if root and path.is_file() and model.can_generate():
            from transformers import GenerationConfig

            try:
                model.generation_config = GenerationConfig.from_pretrained(root)
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s was not understood and is left out: %s", path, error)

    def parallel_rules(self, model: nn.Module, axis: str) -> dict[str, str]:
        return upstream.parallel_rules(model, axis)

    def attention(self, model: nn.Module) -> Attention:
        if obstacle := attention_parts.obstacle(model):
            return Attention(obstacle=obstacle)
        heads, key_value_heads = attention_parts.heads(model)
        kinds = attention_parts.kinds(model)
        return Attention(attention_parts.implementation(model), heads, key_value_heads, kinds)

    def unsaved(self, model: nn.Module) -> tuple[str, ...]:
        return upstream.ignorable_on_save(model)

    def save_settings(self, model: nn.Module, directory: Path, dtype: torch.dtype | None) -> bool:
        """Write the configuration, generation configuration and code, as ``save_pretrained`` does."""
        described: PreTrainedModel = model
        config = copy.deepcopy(described.config)
        # Dtype of the files: the requested one, else the present one, else the configuration's.
        present = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        config.dtype = dtype or present or config.dtype
        # FSDP2 prefixes the class name with ``FSDP``.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        if described.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(described, directory, config=config)
        config.save_pretrained(directory)
        if described.can_generate() and described.generation_config is not None:
            described.generation_config.save_pretrained(directory)
        return True

    def own_loading(self, kind: type[nn.Module]) -> OwnLoading | None:
        """Return ``from_pretrained`` of the library's own class."""
        own = ("transformers.", "transformers_modules.")  # the second: code next to a checkpoint
        plain: type[PreTrainedModel] = next(k for k in kind.__mro__ if k.__module__.startswith(own))

        def load(root: str, dtype: torch.dtype | None) -> nn.Module:
            with without_bars("transformers"):
                loaded: nn.Module = plain.from_pretrained(root, dtype=dtype or "auto")
            return loaded

        return load


def _find_class_and_config(
    root: str | None, kind: type[nn.Module] | None, trusted: bool = False
) -> tuple[type[nn.Module], PreTrainedConfig]:
    import transformers

    # True if the model's class is code next to the weights, which runs only if trusted.
    coded = "auto_map" in _read_config(root)
    # As in from_pretrained, a class reads its own configuration, which may be a part of the checkpoint's.
    reader = getattr(kind, "config_class", None)
    try:
        with refuse_questions():
            if reader is not None:
                config = reader.from_pretrained(root)
            else:
                config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=trusted)
            own_class = checkpoint_class(config, str(root)) if trusted and coded and kind is None else None
    except Exception as error:
        if coded and not trusted:
            raise BuildError(f"{root}/config.json: {_CODE}") from error
        if not coded and not isinstance(error, (ValueError, KeyError, OSError)):
            raise
        if coded:
            raise BuildError(
                f"{root}: the model's code in this directory fails: {type(error).__name__}: {error}"
            ) from error
        raise BuildError(f"{root}/config.json names no model that transformers knows: {error}") from error
    # Weights are dequantised while loading, so build the model without quantisation.
    config.__dict__.pop("quantization_config", None)
    if own_class is not None:
        return own_class, config
    try:
        return (_find_class(config, f"{root}/config.json") if kind is None else kind), config
    except BuildError as error:
        if coded and not trusted:
            raise BuildError(f"{root}/config.json: {_CODE}") from error
        raise


def _find_class(config: PreTrainedConfig, called: str = "the configuration") -> type[nn.Module]:
    import transformers

    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type):
            return kind
    # A configuration without class gets the base model of its type, as in ``AutoModel``.
    mapping = transformers.MODEL_MAPPING
    if type(config) in mapping:
        kind = mapping[type(config)]
        assert isinstance(kind, type), "a mapping of classes"
        return kind
    raise BuildError(
        f"{called} names the architecture {config.architectures}, which transformers "
        f"{transformers.__version__} does not have; pass model= with the class or a callable that builds it"
    )


def _read_config(root: str | None) -> JsonObject:
    path = Path(root) / "config.json" if root else None
    if path is None or not path.is_file():
        raise BuildError(
            f"{root} has no config.json, which names the model's class; from Python, pass model= with the "
            "class or a callable that builds it"
        )
    try:
        return read_config(path.parent) or {}
    except CheckpointError as error:
        raise BuildError(str(error)) from error


def _parse_dtype(value: object) -> torch.dtype | None:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    return dtype if isinstance(dtype, torch.dtype) else None


def list_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configuration and those of its parts."""
    nested = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return [config, *(part for part in nested if part is not None)]


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedConfig:
    for part in list_parts(config):
        part.dtype = dtype
    return config


# This follows transformers' ``convert_and_load_state_dict_in_model``. Keys are in natural order. All
# renamings apply in turn, then at most one converter. A key that the mapping leads to no target keeps its
# name. Each target gets a fresh converter.
def convert(
    model: torch.nn.Module,
    mapping: Sequence[WeightTransform],
    symbols: CheckpointSymbols,
    targets: Mapping[str, Target],
) -> Recipes:
    """Run the conversions ``mapping`` on ``symbols``.

    ``targets`` are by the model's state-dict names. Raises ConversionError if an operation fails.
    """
    core = loading_core()
    groups, plain, unexpected = _assign(core, model, mapping, symbols, targets)
    converted: dict[str, SymbolicTensor] = {}
    # Equal layers are converted once: the sources and the result of the first of each form.
    known: dict[Hashable, tuple[list[str], SymbolicTensor]] = {}
    for first, (converter, members) in groups.items():
        keys = [key for key, _ in members]
        form: Hashable = first
        # Other operations depend on the name of the layer.
        if all(type(one) in (core.MergeModulelist, core.Concatenate) for one in converter.operations):
            form = id(converter), targets[first].dtype, *((p, symbols.form(key)) for key, p in members)
        if form in known:
            names, (keys, result) = dict(zip(known[form][0], keys, strict=True)), known[form]
            pieces = [replace(p, source=tuple(names[str(s)] for s in p.source)) for p in result.pieces]
            results = {first: SymbolicTensor.filled(pieces, result.shape, result.dtype)}
        else:
            results = _run(converter, members, symbols, targets[first], model)
            if [*results] == [first] and not results[first].value.computed:
                known[form] = keys, results[first]
        converted |= results
    unexpected += [name for name in converted if name not in targets]
    tensors = {name: symbols[key] for name, key in plain.items()} | converted
    used = tuple(transform for transform in mapping if transform.was_used())
    return assemble_recipes(tensors, targets, unexpected, frozenset(converted), used)


def _assign(
    core: ModuleType,
    model: PreTrainedModel,
    mapping: Sequence[object],
    symbols: CheckpointSymbols,
    targets: Mapping[str, Target],
) -> tuple[dict[str, tuple[WeightConverter, _Members]], dict[str, str], list[str]]:
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    # The driver only asks whether a name is present.
    present = dict.fromkeys(targets, True)
    groups: dict[str, tuple[WeightConverter, _Members]] = {}
    plain: dict[str, str] = {}
    unexpected: list[str] = []
    # Names share most of their parts, whose keys are made once.
    part_key = functools.cache(core.dot_natural_key)
    for key in sorted(symbols, key=lambda key: [part_key(part) for part in key.split(".")]):
        name, pattern = core.rename_source_key(key, renamings, converters, model.base_model_prefix, present)
        if name not in targets and key in targets:
            name, pattern = core.rename_source_key(key, [], [], model.base_model_prefix, present)
        if name not in targets:
            if pattern is None:
                unexpected.append(name)
            else:
                converter = by_pattern[pattern]
                first = converter.target_patterns[0]
                unexpected += [name.replace(first, target) for target in converter.target_patterns]
        elif pattern is None:
            # As in the driver, the first key counts.
            plain.setdefault(name, key)
        else:
            groups.setdefault(name, (by_pattern[pattern], []))[1].append((key, pattern))
    return groups, plain, list(dict.fromkeys(unexpected))


def _run(
    converter: WeightConverter,
    members: _Members,
    symbols: CheckpointSymbols,
    target: Target,
    model: PreTrainedModel,
) -> dict[str, SymbolicTensor]:
    converter, first = deepcopy(converter), target.name
    # A converter that dequantises takes stored tensors. Others take tensors in the dtype of the model, and
    # compute in it.
    reads_stored = any(getattr(operation, "hf_quantizer", None) for operation in converter.operations)
    for key, pattern in members:
        symbol: torch.Tensor = symbols[key]
        if symbol.dtype != target.dtype and not reads_stored:
            symbol = symbol.to(target.dtype)
        converter.add_tensor(first, key, pattern, symbol)

    def convert() -> dict[str, SymbolicTensor]:
        tensors = converter.convert(first, model=model, config=model.config)
        return {k: snapshot(v[0] if isinstance(v, list) else v) for k, v in tensors.items()}

    try:
        result = trace_call("the conversion", convert)
    except ConversionError as error:
        raise ConversionError(f"{first}: {error}") from error
    except Exception as error:
        operations = ", ".join(type(op).__name__ for op in converter.operations)
        sources = [key for keys in converter.layer_targets.values() for key in sorted(keys)]
        shown = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
        absent = _find_absent(sources)
        raise ConversionError(
            f"{first}: the conversion {operations} of {shown} failed: {error}. "
            + (
                f"The checkpoint lacks {', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}"
                if absent
                else "The checkpoint's shapes do not fit the conversion registered for this model"
            )
        ) from error
    return result


def _find_absent(names: Sequence[str]) -> list[str]:
    by_template: dict[str, set[tuple[str, ...]]] = {}
    for name in names:
        by_template.setdefault(re.sub(r"\d+", "{}", name), set()).add(tuple(re.findall(r"\d+", name)))
    everywhere = set().union(*by_template.values())
    return [
        template.format(*numbers)
        for template, there in by_template.items()
        for numbers in sorted(everywhere - there)
        if template.count("{}") == len(numbers)
    ]
