"""A checkpoint as the model has it: which tensors are trained, in which order, and which are buffers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from zerostart import models
from zerostart.checkpoint.formats.assembling import ParameterGroup
from zerostart.checkpoint.source import read_config
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.loading.preparation import equal_in
from zerostart.models import Built
from zerostart.recipe import Recipes, main_dtype, torch_dtype
from zerostart.recipe.dtypes import spelling
from zerostart.state.converting.contents import Contents, Stored


@dataclass
class ModelForm:
    """What is stepped, in groups; what is frozen; and buffers: by the names of the model's state dict."""

    contents: Contents
    groups: list[ParameterGroup]
    frozen: dict[str, Stored] = field(default_factory=dict)
    buffers: dict[str, Stored] = field(default_factory=dict)
    #: Other names of parameters.
    ties: dict[str, str] = field(default_factory=dict)
    #: Whether weights are quantised in the source, and computed from that.
    dequantised: bool = False
    #: The configuration of the model that was built, by names of files, where the source has none.
    settings: dict[str, bytes] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, Stored]:
        """The weights that are stepped."""
        return {name: self.contents.weights[name] for group in self.groups for name in group.parameters}


def built_model(contents: Contents) -> tuple[Built, Recipes]:
    """The model of the configuration beside the weights, on meta, and where its tensors come from.

    Raises BuildError without a class that the configuration names, and CoverageError where its tensors and
    those of the checkpoint are not the same.
    """
    built, stored = _built(contents)
    catalog = contents.catalogs[0]
    models.set_dtypes(built, stored)
    recipes = built.recipes(catalog, built.library.expectations(built))
    coverage = models.tie_names(built, recipes, equal_in(catalog, World(0, 1, None)))
    coverage.check(catalog.place, type(built.model).__name__, True)
    return built, recipes


def _built(contents: Contents) -> tuple[Built, dict[str, torch.dtype]]:
    """The model of the configuration, and the dtypes of the weights."""
    catalog = contents.catalogs[0]
    shapes = {name: stored.shape for name, stored in contents.weights.items()}
    stored = {name: torch_dtype(tensor.dtype, name) for name, tensor in contents.weights.items()}
    first = next((d for d in stored.values() if d.is_floating_point and d.itemsize > 1), None)
    main = main_dtype(catalog.weights.values())
    models.require(None, catalog.root, shapes)
    return models.build(None, catalog.root, None, first, main, False, shapes), stored


def as_model(contents: Contents) -> ModelForm:
    """``contents`` under the names of the model, with what is trained in the order of its parameters.

    A training checkpoint says which these are; else the model that the configuration names is built, and all
    of its parameters count as trained. Raises what building a model raises.
    """
    if contents.groups and contents.buffers is not None:
        buffers = contents.buffers
        own = contents
    elif contents.groups:
        own, buffers = _with_kinds(contents)
    else:
        built, recipes = built_model(contents)
        own, buffers = _under_own_names(contents, built.model, recipes)
        return replace(
            _form(own, buffers),
            dequantised=built.quantizer is not None,
            settings={} if contents.root and read_config(contents.root) else _settings(built),
        )
    return _form(own, buffers)


def _settings(built: Built) -> dict[str, bytes]:
    """What the model's library writes of a configuration that it knows by the tensors alone."""
    with tempfile.TemporaryDirectory(prefix="zerostart-") as folder:
        built.library.save_settings(built.model, Path(folder), None)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


def _with_kinds(contents: Contents) -> tuple[Contents, frozenset[str]]:
    """The same with ties and buffers, where the optimizer says what is trained and nothing says the rest."""
    trained = {name for group in contents.groups for name in group.parameters}
    if trained | contents.ties.keys() >= contents.weights.keys():
        return contents, frozenset()
    model = _built(contents)[0].model
    ties = dict(contents.ties)
    for names in _tied(model):
        first = next((name for name in names if name in trained), names[0])
        ties |= {name: first for name in names if name != first and name in contents.weights}
    buffers = frozenset(name for name, _ in model.named_buffers())
    known = trained | ties.keys() | buffers | {name for name, _ in model.named_parameters()}
    if unknown := next((name for name in contents.weights if name not in known), None):
        raise ConfigError(
            f"{contents.catalogs[0].place} has {unknown}, which is not trained, and which "
            f"{type(model).__name__}, the model of its configuration, has neither as a parameter nor as a "
            "buffer: put the config.json of the model that was trained beside it, or convert to hf or dcp"
        )
    return replace(contents, ties=ties), buffers


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, of one that has several in the order of the model."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return list(found.values())


def _form(contents: Contents, buffers: frozenset[str]) -> ModelForm:
    trained = {name for group in contents.groups for name in group.parameters}
    rest = {
        name: stored
        for name, stored in contents.weights.items()
        if name not in trained and name not in contents.ties
    }
    for group in contents.groups:
        if lost := next((name for name in group.parameters if name not in contents.weights), None):
            raise ConfigError(
                f"the optimizer has the parameter {lost}, of which the checkpoint has no weights"
            )
        dtypes = ((name, contents.weights[name].dtype) for name in group.parameters)
        if lost := next((name for name, dtype in dtypes if dtype.startswith("C")), None):
            raise ConfigError(
                f"parameter {lost} is complex, and masters of DeepSpeed are fp32: convert to hf or dcp"
            )
    return ModelForm(
        contents,
        contents.groups,
        {name: stored for name, stored in rest.items() if name not in buffers},
        {name: stored for name, stored in rest.items() if name in buffers},
        dict(contents.ties),
    )


def _under_own_names(
    contents: Contents, model: nn.Module, recipes: Recipes
) -> tuple[Contents, frozenset[str]]:
    """The weights as the model's own tensors, all parameters in one group."""
    found = {
        name: Stored(name, spelling(recipe.target.dtype, name), recipe.target.shape, recipe.pieces)
        for name, recipe in recipes.by_name.items()
    }
    weights: dict[str, Stored] = {}
    ties: dict[str, str] = {}
    names = []
    for tied in _tied(model):
        name = tied[0]
        ties |= dict.fromkeys(tied[1:], name)
        # Of a tied pair the checkpoint may have either name.
        stored = next((found[one] for one in tied if one in found), None)
        if stored is None:
            raise ConfigError(
                f"the checkpoint has no values for the parameter {name} of {type(model).__name__}"
            )
        weights[name] = stored
        names.append(name)
    kept = {name for name, _ in model.named_buffers()}
    buffers = {name: stored for name, stored in found.items() if name in kept}
    own = replace(
        contents,
        weights=weights | buffers,
        groups=[ParameterGroup({}, tuple(names))],
        ties=ties,
        buffers=frozenset(buffers),
    )
    return own, frozenset(buffers)


def state_keys(form: ModelForm) -> tuple[list[str], list[str]]:
    """The states of the optimizer that lie as the parameters do, and those that do not, in words."""
    kept, left = [], []
    trained = form.trained
    for key, by_name in form.contents.states.items():
        if all(stored.shape == trained[name].shape for name, stored in by_name.items() if name in trained):
            kept.append(key)
        else:
            left.append(f"{key}, whose shapes are not those of the parameters")
    return kept, left


def one_number(form: ModelForm, key: str, names: Iterable[str]) -> float | None:
    """The number that all of some parameters have; None where none has one.

    Raises ConfigError where they have different ones.
    """
    values: Mapping[str, float] = form.contents.numbers.get(key, {})
    found = {values[name]: name for name in names if name in values}
    if len(found) > 1:
        (a, first), (b, second) = list(found.items())[:2]
        raise ConfigError(
            f"{first} has {key}={a:g} and {second} has {key}={b:g}, but they are in one buffer of a ZeRO "
            "checkpoint, which has one for all: convert to dcp"
        )
    return next(iter(found), None)


def numbers_of(form: ModelForm, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """All numbers of some parameters that are stepped together, as torch's optimizers have them."""
    listed = list(names)
    found = {}
    for key in form.contents.numbers:
        value = one_number(form, key, listed)
        if value is not None:
            found[key] = torch.tensor(value, dtype=torch.float32, device="cpu")
    return found
