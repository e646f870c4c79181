"""Interface of model libraries.

Subclass ``ModelLibrary`` and register it by name (``register_model_library``, or the entry point group
``zerostart.model_libraries``); ``zerostart.testing.ModelLibraryConformance`` tests it. Defaults suit models
whose checkpoints have the names of their state dict.
"""

# ruff: noqa: B027  # a method that a library may leave out does nothing

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.errors import BuildError, ConversionError
from zerostart.models.aliases import find_owner, replace_tensor, state_names
from zerostart.models.operator_log import OperatorLog
from zerostart.recipe import (
    CheckpointSymbols,
    Coverage,
    Recipes,
    Target,
    dequantise_symbols,
    match_names,
    one_thread,
    run_converter,
)

#: Methods that run autoencoders and image encoders.
ENTRIES = ("encode", "decode", "tiled_encode", "tiled_decode", "encode_image", "encode_video")
#: From a state dict with the checkpoint's names and shapes to one with the model's.
Converter = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
#: From a directory and a dtype (None: the checkpoint's) to the whole model.
OwnLoading = Callable[[str, torch.dtype | None], nn.Module]


@dataclass(frozen=True)
class Attention:
    """Attention of a model, for ranks that share sequences."""

    #: Name of the implementation in transformers.
    implementation: str = ""
    #: Number of query heads.
    heads: int = 0
    #: Number of key and value heads.
    key_value_heads: int = 0
    #: Kinds of layers.
    kinds: frozenset[str] = frozenset()
    #: Reason why ranks cannot share sequences; all other fields are then empty.
    obstacle: str = ""


@dataclass(frozen=True)
class BuildRequest:
    """Inputs of a model's construction: the caller's wishes, and facts about the checkpoint."""

    #: Directory of the checkpoint's configuration; None without one.
    root: str | None
    #: Dtype that the caller requests.
    dtype: torch.dtype | None = None
    #: Dtype of the checkpoint's first floating tensor.
    first_dtype: torch.dtype | None = None
    #: Dtype of most elements of the checkpoint.
    main_dtype: torch.dtype | None = None
    #: True if the caller allows running code in ``root``.
    trust_remote_code: bool = False
    #: Shapes of the checkpoint's tensors by name.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Construction:
    """Construction of a model by ``make()``.

    ``building`` is torch's default dtype meanwhile; ``dtype`` is as in ``Built``; ``name`` of the class is
    for messages.
    """

    name: str
    make: Callable[[], nn.Module]
    building: torch.dtype
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Built:
    """A model on meta, its construction log and its library."""

    model: nn.Module
    log: OperatorLog
    #: Floating dtype of the loaded model; None if each tensor keeps the checkpoint's dtype.
    dtype: torch.dtype | None
    #: False if the caller built the module before.
    logged: bool
    library: ModelLibrary
    #: Dequantiser of the library for a quantised checkpoint; None for others.
    quantizer: object = None

    @one_thread()
    def recipes(self, catalog: Catalog, targets: Mapping[str, Target], converter: object = None) -> Recipes:
        """Return recipes that do not depend on the number of threads."""
        return self.library.recipes(self, catalog, targets, converter)


class ModelLibrary(ABC):
    """One library of models.

    A subclass defines ``handles``, and ``construction`` unless callers build its models (``from_config``).
    Defaults suit models whose checkpoints have the names of their state dict.
    """

    # Building models without memory, and their expectations of a checkpoint.

    #: Name for registration.
    name: ClassVar[str]
    #: Start of the names of weight files in a directory.
    weights_stem: ClassVar[str] = "model"
    #: True if classes are built from the configuration next to the weights, not by calling them.
    from_config: ClassVar[bool] = True

    @abstractmethod
    def handles(self, kind: type) -> bool:
        """Return True for the library's classes, without importing it."""

    def describes(self, root: str | None) -> bool:
        """Return True if the configuration in ``root`` is the library's."""
        return False

    def configuration_of(
        self, shapes: Mapping[str, tuple[int, ...]], kind: type[nn.Module] | None = None
    ) -> JsonObject | None:
        """Return the configuration of tensors that the library recognises, or None.

        ``kind`` is the class that the caller wants. Raises BuildError if the tensors are known, but their
        configuration is not available.
        """
        return None

    def import_code(self, kind: type[nn.Module] | None, root: str | None) -> None:
        """Import the code for ``kind``, by default ``root``'s class.

        Raises BuildError or UnsupportedVersionError.
        """

    def construction(self, kind: type[nn.Module] | None, request: BuildRequest) -> Construction:
        """Describe how to build ``kind``, by default ``request.root``'s class.

        Raises BuildError.
        """
        raise BuildError(
            f"{self.name} does not build models from a configuration; pass model= with a callable "
            "that builds it"
        )

    def of_configuration(
        self, config: object, dtype: torch.dtype | None
    ) -> tuple[Callable[[], nn.Module], torch.dtype | None] | None:
        """Return a builder for ``config``, and the dtype in it.

        None if ``config`` belongs to another library. Raises BuildError if it names no class.
        """
        return None

    def whole_dtype(self, model: nn.Module, request: BuildRequest, is_module: bool) -> torch.dtype | None:
        """Return ``Built.dtype`` for a callable's model, or the caller's module."""
        return request.dtype

    def dtype_plan(self, model: nn.Module, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
        """Return patterns of parameters in other dtypes, and these dtypes."""
        return []

    def expectations(self, built: Built) -> dict[str, Target]:
        """Return the target of each state-dict name of the model."""
        plan = [] if built.dtype is None else self.dtype_plan(built.model, built.dtype)
        targets: dict[str, Target] = {}
        for name, tensor, buffer in state_names(built.model):
            dtype = next((other for pattern, other in plan if pattern.search(name)), tensor.dtype)
            targets[name] = Target(name, tuple(tensor.shape), dtype, buffer, built.dtype is None)
        return targets

    # Converting checkpoints to models and back.

    #: True if loading keeps shared memory shared, as ``load_state_dict`` does.
    keeps_views: ClassVar[bool] = False

    def converter(self, model: nn.Module) -> Converter | None:
        """Return the converter from checkpoint to model, or None.

        It maps state dicts, runs on symbolic tensors, and may only move elements or compute with torch's
        operators.
        """
        return None

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: object = None
    ) -> Recipes:
        """Return the recipes of covered targets, and the names left over.

        ``converter`` is the caller's, None for the library's own. Raises ConversionError for a converter that
        fails, is random, or depends on values of weights.
        """
        converter = choose_converter(built.model, converter, self.converter)
        if converter is None:
            return match_names(dequantise_symbols(catalog, targets), targets)
        return match_names(run_converter(converter, CheckpointSymbols(catalog)), targets)

    def revert(self, model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state dict in the checkpoint's layout; meta tensors included."""
        return dict(state_dict)

    def quantizer(self, model: nn.Module, root: str | None, dtype: torch.dtype | None) -> object:
        """Prepare the model, and return a dequantiser if needed."""
        return None

    def quantisation(self, quantizer: object) -> str:
        """Return the name of the quantisation method."""
        return ""

    # Ties, initial values and marks of a load, which no checkpoint contains.

    def ties(self, model: nn.Module) -> dict[str, str]:
        """Return tied names, each with the name it is tied to."""
        return {}

    def tie(self, model: nn.Module, missing: set[str]) -> None:
        """Tie names; of a pair, the present name keeps its tensor."""
        for name, source in self.ties(model).items():
            kept, other = (name, source) if source in missing and name not in missing else (source, name)
            owner, leaf = find_owner(model, kept)
            replace_tensor(model, other, owner.get_parameter(leaf))

    def untie(self, model: nn.Module, name: str, source: str) -> None:
        """Separate ``name`` and ``source``, which differ in the checkpoint."""
        (owner, leaf), (other, other_leaf) = find_owner(model, name), find_owner(model, source)
        parameter = owner._parameters.get(leaf)
        if parameter is not None and parameter is other._parameters.get(other_leaf):
            owner._parameters[leaf] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )

    def lacking(self, model: nn.Module, coverage: Coverage) -> Iterable[str]:
        """Yield state-dict names that the checkpoint may lack after tying."""
        return coverage.missing

    def ignorable(self, model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return patterns of ignorable missing and unexpected names (searched)."""
        return (), ()

    def mark_loaded(self, tensor: torch.Tensor) -> None:
        """Let the model's initialiser skip ``tensor``."""

    def initialiser(self, model: nn.Module) -> Callable[[], None] | None:
        """Return the initialiser of the whole model.

        It runs on meta, and its calls are logged. Without one, a missing parameter gets the value of its
        constructor.
        """
        return None

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        """Set attributes that later calls of the library read.

        ``name`` of the source is None for tensors in memory.
        """

    def own_loading(self, kind: type[nn.Module]) -> OwnLoading | None:
        """Return the library's own unsharded loading, or None.

        Loads are compared with it.
        """
        return None

    # Running models of the library, whole or in shards.

    def entries(self, model: nn.Module) -> tuple[str, ...]:
        """Return methods other than forward by which users run ``model``."""
        return tuple(name for name in ENTRIES if callable(getattr(type(model), name, None)))

    def keep_outputs(self, model: nn.Module) -> None:
        """Keep outputs although an engine may have changed the class."""

    def is_called_by_parts(self, model: nn.Module) -> bool:
        """Return True if users call modules of ``model`` instead of its forward."""
        return False

    def parallel_rules(self, model: nn.Module, axis: str) -> dict[str, str]:
        """Return the expert (``"ep"``) or tensor (``"tp"``) plan of the model.

        It maps names of modules or parameters (``*``: a layer) to transformers' styles.
        """
        return {}

    def attention(self, model: nn.Module) -> Attention:
        """Describe the attention of ``model``."""
        return Attention(obstacle="attention that zerostart knows nothing of")

    # Files of a saved model other than its tensors.

    #: Default format of saved adapters: ``peft`` or ``diffusers``.
    adapter_format: ClassVar[str] = "peft"

    def unsaved(self, model: nn.Module) -> tuple[str, ...]:
        """Return state-dict names that the model does not save."""
        return ()

    def save_settings(self, model: nn.Module, directory: Path, dtype: torch.dtype | None) -> bool:
        """Write the model's configuration; return False if it has none.

        ``dtype`` of the saved weights, None for the present one. The model's settings do not change. Raises
        OSError.
        """
        return False


def choose_converter(
    model: nn.Module, converter: object, own: Callable[[nn.Module], Converter | None]
) -> Converter | None:
    """Return the caller's converter, or else the library's.

    Raises ConversionError for a list of conversions, which only models of transformers have.
    """
    if converter is None:
        return own(model)
    if not callable(converter):
        raise ConversionError(
            "converter is a list of conversions, which only transformers models use, but "
            f"{type(model).__name__} is not one; pass a callable from state dict to state dict"
        )
    chosen: Converter = converter
    return chosen
