"""What zerostart asks of a library of models.

An outsider's library is a subclass of ``ModelLibrary``, registered by name (``register_model_library``, or
the entry point group ``zerostart.model_libraries``); ``zerostart.testing.ModelLibraryConformance`` is what it
has to pass. What a subclass leaves out is as for models whose checkpoints have their state dict's own names.
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
from zerostart.models.aliases import owner_of, replace_tensor, state_names
from zerostart.models.operator_log import OperatorLog
from zerostart.recipe import (
    Coverage,
    Recipes,
    Target,
    dequantised_symbols,
    matched,
    one_thread,
    run_converter,
    symbols_of,
)

#: What autoencoders and image encoders are run by.
ENTRIES = ("encode", "decode", "tiled_encode", "tiled_decode", "encode_image", "encode_video")
#: From a state dict under the checkpoint's names and shapes to one under the model's.
Converter = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
#: From a directory and the dtype that is asked for (None: the checkpoint's own) to the whole model.
OwnLoading = Callable[[str, torch.dtype | None], nn.Module]


@dataclass(frozen=True)
class Attention:
    """How a model attends along its sequences, for ranks that share them."""

    #: As transformers names it.
    implementation: str = ""
    #: Heads of queries.
    heads: int = 0
    #: Heads of keys and values.
    key_value_heads: int = 0
    #: Kinds of its layers.
    kinds: frozenset[str] = frozenset()
    #: What it has that no ranks can share, in words; then the rest is empty.
    obstacle: str = ""


@dataclass(frozen=True)
class Stored:
    """What is known of a checkpoint, and asked for, when a model is built for it."""

    #: Directory of its configuration; None without one.
    root: str | None
    #: Dtype that the caller wants.
    asked: torch.dtype | None = None
    #: Dtype of its first floating tensor.
    first: torch.dtype | None = None
    #: Dtype of most of its elements.
    main: torch.dtype | None = None
    #: Whether the caller has said that code which lies in ``root`` may be run; without that none ever is.
    trusted: bool = False
    #: Of its tensors, by name.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Construction:
    """How a model is built from its configuration: ``make()``, with ``building`` as torch's default dtype.

    ``dtype`` is as in ``Built``; ``name`` is the class's, for messages.
    """

    name: str
    make: Callable[[], nn.Module]
    building: torch.dtype
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Built:
    """A model on meta, the log of its construction, and the library that it is of."""

    model: nn.Module
    log: OperatorLog
    #: Floating dtype that the load gives the model as a whole; None lets each tensor keep the dtype that the
    #: checkpoint stores.
    dtype: torch.dtype | None
    #: False for a module that the caller had built before.
    logged: bool
    library: ModelLibrary
    #: The library's own, set to dequantise, for a checkpoint that is quantised; None for others.
    quantizer: object = None

    @one_thread()
    def recipes(self, catalog: Catalog, targets: Mapping[str, Target], converter: object = None) -> Recipes:
        """``ModelLibrary.recipes`` of this model, with bits that no number of threads decides."""
        return self.library.recipes(self, catalog, targets, converter)


class ModelLibrary(ABC):
    """One library of models.

    It must say which classes are its own (``handles``), and how one is built: ``construction``, unless its
    models come from a callable of the caller's (``from_config``). Everything else it may say: what is left
    out is as for models whose checkpoints have their state dict's own names.
    """

    # How models are built without memory, and what they expect of a checkpoint.

    #: The name under which it is registered.
    name: ClassVar[str]
    #: What the names of weight files begin with, by which the library finds them in a directory.
    weights_stem: ClassVar[str] = "model"
    #: Whether a class is built from the configuration beside the weights, and not by calling it.
    from_config: ClassVar[bool] = True

    @abstractmethod
    def handles(self, kind: type) -> bool:
        """Whether ``kind`` is a class of this library; told without importing the library."""

    def describes(self, root: str | None) -> bool:
        """Whether the configuration in the directory ``root`` is this library's, by a mark of its own."""
        return False

    def configuration_of(
        self, shapes: Mapping[str, tuple[int, ...]], kind: type[nn.Module] | None = None
    ) -> JsonObject | None:
        """The configuration of a checkpoint that has none, by its tensors; None if it knows no such tensors.

        ``kind`` is the class that is wanted of it. Raises BuildError where it knows whose they are and has
        no configuration of it at hand.
        """
        return None

    def require(self, kind: type[nn.Module] | None, root: str | None) -> None:
        """Import what building ``kind``, or without one what ``root`` names, needs.

        Raises BuildError or UnsupportedVersionError.
        """

    def construction(self, kind: type[nn.Module] | None, stored: Stored) -> Construction:
        """How to build ``kind``, or without one the class that ``stored.root`` names. Raises BuildError."""
        raise BuildError(
            f"{self.name} does not build models from a configuration; pass model= with a callable "
            "that builds it"
        )

    def of_configuration(
        self, config: object, dtype: torch.dtype | None
    ) -> tuple[Callable[[], nn.Module], torch.dtype | None] | None:
        """What builds a model, initialised, of ``config`` alone, in ``dtype``; and the dtype that it names.

        None for what is no configuration of this library. Raises BuildError for one that names no class.
        """
        return None

    def whole_dtype(self, model: nn.Module, stored: Stored, given: bool) -> torch.dtype | None:
        """``Built.dtype`` of a model that the caller's callable has made, or (``given``) the caller."""
        return stored.asked

    def dtype_plan(self, model: nn.Module, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
        """Patterns of parameters that a model loaded in ``dtype`` keeps in another, and which."""
        return []

    def expectations(self, built: Built) -> dict[str, Target]:
        """What each state-dict name of the model expects of the checkpoint."""
        kept = [] if built.dtype is None else self.dtype_plan(built.model, built.dtype)
        targets: dict[str, Target] = {}
        for name, tensor, buffer in state_names(built.model):
            dtype = next((other for pattern, other in kept if pattern.search(name)), tensor.dtype)
            targets[name] = Target(name, tuple(tensor.shape), dtype, buffer, built.dtype is None)
        return targets

    # How a checkpoint becomes a model of the library, and a model a checkpoint again.

    #: Whether loading leaves tensors that share memory sharing it, as ``load_state_dict`` does.
    keeps_views: ClassVar[bool] = False

    def converter(self, model: nn.Module) -> Converter | None:
        """From the checkpoint's state dict to the model's; None where they are the same.

        It is run on symbolic tensors, and may only move elements or calculate by torch's operators.
        """
        return None

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: object = None
    ) -> Recipes:
        """The recipe of every target that the checkpoint covers, and what is left open.

        ``converter`` is the caller's: None for the library's own, or a callable from state dict to state
        dict. Raises ConversionError for one that fails, is random, or depends on the values of weights.
        """
        converter = chosen_converter(built.model, converter, self.converter)
        if converter is None:
            return matched(dequantised_symbols(catalog, targets), targets)
        return matched(run_converter(converter, symbols_of(catalog)), targets)

    def revert(self, model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict of the model under the checkpoint's names and shapes; also of meta tensors."""
        return dict(state_dict)

    def quantizer(self, model: nn.Module, root: str | None, dtype: torch.dtype | None) -> object:
        """What dequantises the weights in ``root``, the model made ready for it; None if they need none."""
        return None

    def quantisation(self, quantizer: object) -> str:
        """The name of the method with which the weights that ``quantizer`` dequantises are quantised."""
        return ""

    # What a model of the library has that no checkpoint gives: ties, first values, marks of a load.

    def ties(self, model: nn.Module) -> dict[str, str]:
        """State-dict names that are tied, and the name that each is tied to."""
        return {}

    def tie(self, model: nn.Module, missing: set[str]) -> None:
        """Tie what ``ties`` says; of a pair the name that is not in ``missing`` is the one that stays."""
        for name, source in self.ties(model).items():
            kept, other = (name, source) if source in missing and name not in missing else (source, name)
            owner, leaf = owner_of(model, kept)
            replace_tensor(model, other, owner.get_parameter(leaf))

    def untie(self, model: nn.Module, name: str, source: str) -> None:
        """Give ``name`` a parameter of its own: the checkpoint has another one there than for ``source``."""
        (owner, leaf), (other, other_leaf) = owner_of(model, name), owner_of(model, source)
        parameter = owner._parameters.get(leaf)
        if parameter is not None and parameter is other._parameters.get(other_leaf):
            owner._parameters[leaf] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )

    def lacking(self, model: nn.Module, coverage: Coverage) -> Iterable[str]:
        """State-dict names that the checkpoint may lack once the model is tied."""
        return coverage.missing

    def ignorable(self, model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Patterns (regular expressions, searched) of names that may be missing, and that may be too much."""
        return (), ()

    def mark_loaded(self, tensor: torch.Tensor) -> None:
        """Tell the model's initialiser to leave ``tensor``, a parameter or buffer, alone."""

    def initialiser(self, model: nn.Module) -> Callable[[], None] | None:
        """What gives the whole model its first values, as the library's own loading does it.

        Run on meta, where its calls are logged. Without one, a parameter that the checkpoint lacks gets what
        its constructor gives it.
        """
        return None

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        """Leave on the loaded model what later calls of the library look at.

        ``name`` is the source's, None for tensors in memory.
        """

    def own_loading(self, kind: type[nn.Module]) -> OwnLoading | None:
        """The library's own loading of the class ``kind``, unsharded, on the CPU; None where it has none.

        A load is compared with it, and never made of it.
        """
        return None

    # How models of the library are run by their users, whole or in shards.

    def entries(self, model: nn.Module) -> tuple[str, ...]:
        """Names of methods of ``model``, beside its forward, by which its users run it."""
        return tuple(name for name in ENTRIES if callable(getattr(type(model), name, None)))

    def keep_outputs(self, model: nn.Module) -> None:
        """Let ``model`` give what it gave, now that an engine may have put its own classes before others."""

    def by_parts(self, model: nn.Module) -> bool:
        """Whether users of ``model`` call the modules in it one by one, and not its forward."""
        return False

    def parallel_rules(self, model: nn.Module, axis: str) -> dict[str, str]:
        """The expert (``"ep"``) or tensor (``"tp"``) parallel plan that the model declares.

        Names of modules or parameters (``*``: a layer) to transformers' styles.
        """
        return {}

    def attention(self, model: nn.Module) -> Attention:
        """How ``model`` attends along its sequences."""
        return Attention(obstacle="attention that zerostart knows nothing of")

    # What is saved of a model beside its tensors.

    #: How adapters are written where nothing else is asked for: as PEFT does, or as diffusers does.
    adapter_format: ClassVar[str] = "peft"

    def unsaved(self, model: nn.Module) -> tuple[str, ...]:
        """State-dict names that the model itself leaves out of what is saved."""
        return ()

    def save_settings(self, model: nn.Module, directory: Path, dtype: torch.dtype | None) -> bool:
        """Write the configuration of ``model`` into ``directory``; whether there is one to write.

        ``dtype`` is that of the weights in the files, None: as held. The model's own settings stay as they
        are. Raises OSError.
        """
        return False


def chosen_converter(
    model: nn.Module, converter: object, own: Callable[[nn.Module], Converter | None]
) -> Converter | None:
    """The converter to run: the caller's, or without one what ``own`` gives for the model.

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
