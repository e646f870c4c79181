"""The suite of tests that every model library has to pass.

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
    """Tests of a library: subclass it, set ``library``, ``kind``, ``missing``, and implement ``write``."""

    #: The name of the library, which is registered once the test module has been imported.
    library: ClassVar[str]
    #: A model class of the library, which its configuration names.
    kind: ClassVar[type[nn.Module]]
    #: A tensor of the checkpoint, by its name there, without which a model can be made.
    missing: ClassVar[str]

    @abstractmethod
    def write(self, root: Path) -> None:
        """Save a small model with values of all kinds to ``root``, as the library does: safetensors files."""

    def left(self, model: nn.Module) -> Any:
        """What the library leaves on a model that it has loaded, to be compared; has to be picklable."""
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
        return _without(root, tmp_path_factory.mktemp("partial"), cls.missing)

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, root: Path, partial: Path) -> list[dict[str, Any]]:
        """The results of loading the checkpoint on two ranks."""
        return on_ranks(_loaded, 2, cls, root, partial)

    def test_it_handles_its_models_and_no_others(self, root: Path, tmp_path: Path) -> None:
        """Expect the library to know its models by class and by configuration, and no others."""
        assert self.library in models.model_library_names()
        assert models.library_of(self.kind).name == self.library
        assert models.library_in(str(root)).name == self.library
        # The last two are asked last: that of directories that say nothing, and that of any module.
        *_, unnamed, plain = models.model_library_names()
        assert models.library_in(str(tmp_path)).name == unnamed, "of a directory without configuration"
        assert models.library_of(nn.Linear).name == plain

    @pytest.mark.parametrize("named", [True, False], ids=["the class", "what the configuration names"])
    def test_a_model_is_built_without_memory(self, root: Path, named: bool) -> None:
        """Build the model; expect its parameters on the meta device and the configured class."""
        built = _built(root, self.kind if named else None)
        assert type(built.model) is self.kind
        assert built.library is models.library_of(self.kind)
        assert {p.device.type for p in built.model.parameters()} == {"meta"}

    def test_expectations_are_the_unsharded_state_dict(self, root: Path) -> None:
        """Expect the names, shapes and dtypes of the unsharded state dict."""
        built, recipes = _recipes(root, self.kind)
        targets = built.library.expectations(built)
        wanted = _reference(self.kind, root).state_dict()
        assert {name: target.shape for name, target in targets.items()} == {
            name: tuple(tensor.shape) for name, tensor in wanted.items()
        }
        assert recipes.by_name
        for name, recipe in recipes.by_name.items():
            assert recipe.target.dtype == wanted[name].dtype, name

    def test_the_converter_gives_what_it_gives_eagerly(self, root: Path) -> None:
        """Convert the stored tensors and convert them back; expect the values of an eager conversion."""
        built, _ = _recipes(root, self.kind)
        library, stored = built.library, _stored(root)
        wanted = _reference(self.kind, root).state_dict()
        converter = library.converter(built.model)
        if converter is not None:
            made = dict(converter(dict(stored)))
            assert made.keys() <= wanted.keys()
            assert [name for name in made if not _same(made[name].to(wanted[name].dtype), wanted[name])] == []
        tied = library.ties(built.model)
        # As a save gives it: each parameter under one of its names.
        whole = {name: tensor for name, tensor in wanted.items() if name not in tied}
        back = library.revert(built.model, whole)
        # More is allowed: a checkpoint need not hold all that a model does.
        assert back.keys() >= stored.keys()
        assert [name for name in stored if not _same(back[name].to(stored[name].dtype), stored[name])] == []

    def test_loads_hold_what_its_own_loading_holds(self, root: Path, found: list[dict[str, Any]]) -> None:
        """Load on two ranks; expect every tensor and buffer of the library's own load, bit for bit."""
        reference = _reference(self.kind, root)
        for rank, loaded in enumerate(found):
            _check_equal(loaded["tensors"], reference.state_dict(), rank)
            _check_equal(loaded["buffers"], dict(reference.named_buffers()), rank)

    def test_ties_are_kept(self, root: Path, found: list[dict[str, object]]) -> None:
        """Expect the tied parameters of the unsharded model to be tied on each rank, and no others."""
        wanted = _tied(_reference(self.kind, root))
        assert [loaded["tied"] for loaded in found] == [wanted, wanted]

    def test_what_is_missing_is_told_and_initialised(
        self, partial: Path, found: list[dict[str, Any]]
    ) -> None:
        """Load without one tensor; expect an error if strict, else the library's own initialisation."""
        built, _ = _recipes(partial, self.kind)
        torch.manual_seed(_SEED)
        reference = _reference(self.kind, partial).state_dict()
        own = built.library.initialiser(built.model) is not None
        for rank, loaded in enumerate(found):
            assert "missing" in loaded["told"], f"rank {rank}: {loaded['told']}"
            assert loaded["told"] == found[0]["told"]
            made, tensors = loaded["initialised"], loaded["made"]
            assert made, "nothing was initialised"
            compared = [name for name in reference if own or name not in made]
            _check_equal({n: tensors[n] for n in compared}, {n: reference[n] for n in compared}, rank)
            assert all(_same(tensors[name], found[0]["made"][name]) for name in tensors)

    def test_it_leaves_what_its_own_loading_leaves(self, root: Path, found: list[dict[str, object]]) -> None:
        """Load; expect evaluation mode, and what ``left`` returns after the library's own load."""
        wanted = self.left(_reference(self.kind, root))
        for loaded in found:
            assert not loaded["training"]
            assert loaded["left"] == wanted


def _without(root: Path, to: Path, name: str) -> Path:
    from safetensors.torch import load_file, save_file

    stored = {}
    for path in sorted(root.iterdir()):
        if path.suffix == ".safetensors":
            stored.update(load_file(path))
        elif not path.name.endswith(".index.json"):
            shutil.copy(path, to)
    del stored[name]
    first = next(path for path in sorted(root.iterdir()) if path.suffix == ".safetensors")
    save_file(stored, to / first.name, {"format": "pt"})
    return to


def _stored(root: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(root.glob("*.safetensors")) for name, t in load_file(path).items()}


def _reference(kind: type[nn.Module], root: Path) -> nn.Module:
    loading = models.library_of(kind).own_loading(kind)
    assert loading is not None, "without a loading of its own there is nothing to compare with"
    return loading(str(root), None)


def _built(root: Path, kind: type[nn.Module] | None) -> models.Built:
    entries = open_catalog(str(root)).tensors.values()
    stored = [torch_dtype(entry.dtype, entry.name) for entry in entries]
    first = next((dtype for dtype in stored if dtype.is_floating_point), None)
    return models.build(kind, str(root), None, first, main_dtype(entries))


def _recipes(root: Path, kind: type[nn.Module]) -> tuple[models.Built, Recipes]:
    catalog, built = open_catalog(str(root)), _built(root, kind)
    models.set_dtypes(built, {name: torch_dtype(e.dtype, name) for name, e in catalog.weights.items()})
    return built, built.recipes(catalog, built.library.expectations(built))


def _loaded(suite: type[ModelLibraryConformance], root: Path, partial: Path) -> dict[str, object]:
    model = zerostart.load(str(root), progress=False)
    assert suite.kind in type(model).__mro__
    whole = {
        "tensors": _whole(model),
        "buffers": {name: buffer.cpu() for name, buffer in model.named_buffers()},
        "tied": _tied(model),
        "training": model.training,
        "left": suite().left(model),
    }
    try:
        zerostart.load(str(partial), model=suite.kind, progress=False)
        told = "nothing was raised"
    except CoverageError as error:
        told = str(error)
    torch.manual_seed(_SEED)
    made = zerostart.load(str(partial), model=suite.kind, strict=False, progress=False)
    return {**whole, "told": told, "made": _whole(made), "initialised": get_record(made).report.initialised}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def _check_equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rank: int) -> None:
    assert have.keys() == want.keys(), f"rank {rank}"
    assert [name for name in want if not _same(have[name], want[name])] == [], f"rank {rank}"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
