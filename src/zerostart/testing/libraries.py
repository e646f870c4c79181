"""Conformance suite for model libraries.

class TestMine(ModelLibraryConformance):
    library = "mine"
    kind = MyModel
    missing = "head.weight"

    def write(self, root):
        MyModel(...).save_pretrained(root)
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zerostart
from zerostart import models
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CoverageError
from zerostart.live.model import get_record
from zerostart.recipe import Recipes, main_dtype, torch_dtype
from zerostart.testing.ranks import on_ranks

_SEED = 11


class ModelLibraryConformance(ABC):
    """Tests of a library; a subclass sets the attributes and implements ``write``."""

    #: Name of the library, which the test module registers.
    library: ClassVar[str]
    #: A model class that the library's configuration can name.
    kind: ClassVar[type[nn.Module]]
    #: A tensor of the checkpoint that a model can do without.
    missing: ClassVar[str]

    @abstractmethod
    def write(self, root: Path) -> None:
        """Save a small model to ``root`` as the library does, in safetensors files."""

    def loaded_attributes(self, model: nn.Module) -> Any:
        """Return picklable attributes that the library's load sets, to compare."""
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Path of the checkpoint that ``write`` has written."""
        root = tmp_path_factory.mktemp("whole")
        cls().write(root)
        return root

    @pytest.fixture(scope="class")
    @classmethod
    def partial(cls, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Path of a copy of the checkpoint that lacks one tensor."""
        return _copy_without(root, tmp_path_factory.mktemp("partial"), cls.missing)

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls, root: Path, partial: Path) -> list[dict[str, Any]]:
        """The results of loading the checkpoint on two ranks."""
        return on_ranks(_load_both, 2, cls, root, partial)

    def test_it_handles_its_models_and_no_others(self, root: Path, tmp_path: Path) -> None:
        """Expect the library to know its models by class and by configuration."""
        assert self.library in models.model_library_names()
        assert models.library_of(self.kind).name == self.library
        assert models.library_in(str(root)).name == self.library
        # The last two are for directories without a configuration and for any module.
        *_, unnamed, plain = models.model_library_names()
        assert models.library_in(str(tmp_path)).name == unnamed, "directory without a configuration"
        assert models.library_of(nn.Linear).name == plain

    @pytest.mark.parametrize("named", [True, False], ids=["the class", "what the configuration names"])
    def test_a_model_is_built_without_memory(self, root: Path, named: bool) -> None:
        """Build the model; expect its parameters on the meta device and the configured class."""
        built = _build(root, self.kind if named else None)
        assert type(built.model) is self.kind
        assert built.library is models.library_of(self.kind)
        assert {p.device.type for p in built.model.parameters()} == {"meta"}

    def test_expectations_are_the_unsharded_state_dict(self, root: Path) -> None:
        """Expect the names, shapes and dtypes of the unsharded state dict."""
        built, recipes = _trace_recipes(root, self.kind)
        targets = built.library.expectations(built)
        expected = _load_reference(self.kind, root).state_dict()
        assert {name: target.shape for name, target in targets.items()} == {
            name: tuple(tensor.shape) for name, tensor in expected.items()
        }
        assert recipes.by_name
        for name, recipe in recipes.by_name.items():
            assert recipe.target.dtype == expected[name].dtype, name

    def test_the_converter_gives_what_it_gives_eagerly(self, root: Path) -> None:
        """Convert the stored tensors and revert them; expect the eager values."""
        built, _ = _trace_recipes(root, self.kind)
        library, stored = built.library, _read_stored(root)
        expected = _load_reference(self.kind, root).state_dict()
        converter = library.converter(built.model)
        if converter is not None:
            converted = dict(converter(dict(stored)))
            assert converted.keys() <= expected.keys()
            for name, tensor in converted.items():
                assert _is_same(tensor.to(expected[name].dtype), expected[name]), name
        tied = library.ties(built.model)
        # As in a save: each parameter under one name.
        whole = {name: tensor for name, tensor in expected.items() if name not in tied}
        back = library.revert(built.model, whole)
        # A model may have more tensors than the checkpoint.
        assert back.keys() >= stored.keys()
        assert [
            name for name in stored if not _is_same(back[name].to(stored[name].dtype), stored[name])
        ] == []

    def test_loads_hold_what_its_own_loading_holds(self, root: Path, results: list[dict[str, Any]]) -> None:
        """Load on two ranks; expect the tensors and buffers of the library's own load."""
        reference = _load_reference(self.kind, root)
        for rank, loaded in enumerate(results):
            _check_equal(loaded["tensors"], reference.state_dict(), rank)
            _check_equal(loaded["buffers"], dict(reference.named_buffers()), rank)

    def test_what_is_missing_is_told_and_initialised(
        self, partial: Path, results: list[dict[str, Any]]
    ) -> None:
        """Load without one tensor; expect an error if strict, otherwise the library's initialisation."""
        built, _ = _trace_recipes(partial, self.kind)
        torch.manual_seed(_SEED)
        reference = _load_reference(self.kind, partial).state_dict()
        own = built.library.initialiser(built.model) is not None
        for rank, loaded in enumerate(results):
            assert "missing" in loaded["error"], f"rank {rank}: {loaded['error']}"
            assert loaded["error"] == results[0]["error"]
            initialised, tensors = loaded["initialised"], loaded["completed"]
            assert initialised, "nothing was initialised"
            compared = [name for name in reference if own or name not in initialised]
            _check_equal({n: tensors[n] for n in compared}, {n: reference[n] for n in compared}, rank)
            assert all(_is_same(tensors[name], results[0]["completed"][name]) for name in tensors)

    def test_it_leaves_what_its_own_loading_leaves(
        self, root: Path, results: list[dict[str, object]]
    ) -> None:
        """Load; expect evaluation mode, and ties and attributes of the library's own load."""
        model = _load_reference(self.kind, root)
        expected = self.loaded_attributes(model), _find_ties(model)
        for loaded in results:
            assert not loaded["training"]
            assert (loaded["attributes"], loaded["tied"]) == expected


def _copy_without(root: Path, to: Path, name: str) -> Path:
    shutil.copytree(root, to, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    stored = _read_stored(root)
    del stored[name]
    save_file(stored, to / min(path.name for path in root.glob("*.safetensors")), {"format": "pt"})
    return to


def _read_stored(root: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(root.glob("*.safetensors")) for name, t in load_file(path).items()}


def _load_reference(kind: type[nn.Module], root: Path) -> nn.Module:
    loading = models.library_of(kind).own_loading(kind)
    assert loading is not None, "the suite compares with the library's own loading"
    return loading(str(root), None)


def _build(root: Path, kind: type[nn.Module] | None) -> models.Built:
    entries = open_catalog(str(root)).tensors.values()
    stored = [torch_dtype(entry.dtype, entry.name) for entry in entries]
    first = next((dtype for dtype in stored if dtype.is_floating_point), None)
    return models.build(kind, str(root), None, first, main_dtype(entries))


def _trace_recipes(root: Path, kind: type[nn.Module]) -> tuple[models.Built, Recipes]:
    catalog, built = open_catalog(str(root)), _build(root, kind)
    models.set_dtypes(built, {name: torch_dtype(e.dtype, name) for name, e in catalog.weights.items()})
    return built, built.recipes(catalog, built.library.expectations(built))


def _load_both(suite: type[ModelLibraryConformance], root: Path, partial: Path) -> dict[str, object]:
    model = zerostart.load(str(root), progress=False)
    assert suite.kind in type(model).__mro__
    whole = {
        "tensors": _gather(model),
        "buffers": {name: buffer.cpu() for name, buffer in model.named_buffers()},
        "tied": _find_ties(model),
        "training": model.training,
        "attributes": suite().loaded_attributes(model),
    }
    try:
        zerostart.load(str(partial), model=suite.kind, progress=False)
        message = "nothing was raised"
    except CoverageError as error:
        message = str(error)
    torch.manual_seed(_SEED)
    completed = zerostart.load(str(partial), model=suite.kind, strict=False, progress=False)
    return {
        **whole,
        "error": message,
        "completed": _gather(completed),
        "initialised": get_record(completed).report.initialised,
    }


def _gather(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}


def _find_ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def _check_equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rank: int) -> None:
    assert have.keys() == want.keys(), f"rank {rank}"
    assert [name for name in want if not _is_same(have[name], want[name])] == [], f"rank {rank}"


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
