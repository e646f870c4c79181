"""The suite of tests that every checkpoint format has to pass.

class TestMine(FormatConformance):
    format = "mine"
    imports = ("my_package.my_format",)

    def write(self, tensors, path):
        my_package.save(tensors, path)
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

import zerostart
from zerostart.checkpoint.formats import format_of, formats
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import ZerostartError
from zerostart.recipe import spelling
from zerostart.testing.ranks import Net, loaded_from, on_ranks, reference, save


class FormatConformance(ABC):
    """Tests of a format: subclass it in a test module, set ``format``, and implement ``write``."""

    #: The name of the format, which is registered once the test module has been imported.
    format: ClassVar[str]
    #: What the ranks import first, so that the format is registered there.
    imports: ClassVar[tuple[str, ...]] = ()
    #: Whether ``write`` makes one file and not a directory.
    single_file: ClassVar[bool] = False
    #: Dtypes that it stores.
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.int64)
    #: Numbers of ranks of real loads, and their engine.
    worlds: ClassVar[tuple[int, ...]] = (2,)
    engine: ClassVar[str] = "fsdp2"

    @abstractmethod
    def write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        """Save ``tensors`` at ``path``: an empty directory, or with ``single_file`` a new file."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Path of the checkpoint that ``write`` has written."""
        path = tmp_path / "checkpoint"
        if not self.single_file:
            path.mkdir()
        return path

    def test_it_recognises_its_own_and_nothing_else(self, path: Path, tmp_path: Path) -> None:
        """Expect the format to recognise its own files, and no empty directory and no safetensors."""
        assert self.format in [format_.name for format_ in formats()]
        self.write({"weight": torch.ones(3)}, path)
        assert format_of(path).name == self.format
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        save(tmp_path / "other" / "model.safetensors")
        for other in ("empty", "other", "other/model.safetensors"):
            assert format_of(tmp_path / other).name != self.format, other

    def test_tensors_are_where_the_catalog_says(self, path: Path) -> None:
        """Expect name, dtype, shape and bytes of tensors of every dtype where the catalog says."""
        tensors = {}
        for number, dtype in enumerate(self.dtypes):
            for shape in ((), (1,), (5,), (3, 4), (2, 3, 5)):
                values = torch.arange(torch.Size(shape).numel()).reshape(shape) + number
                # A name for each, with the shape in it: what is wrong tells which.
                tensors[f"{dtype}.{len(shape)}.{shape}".replace("torch.", "")] = values.to(dtype)
        self.write(tensors, path)
        catalog = open_catalog(path)
        described = {name: (entry.dtype, entry.shape) for name, entry in catalog.weights.items()}
        assert described == {name: (spelling(t.dtype, name), tuple(t.shape)) for name, t in tensors.items()}
        beside = path.parent / "beside.safetensors"
        save_file(tensors, beside)
        difference = zerostart.diff(str(path), str(beside))
        assert sorted(difference.equal) == sorted(tensors)
        assert not difference.differing

    def test_the_catalog_travels(self, path: Path) -> None:
        """Pickle the catalog, as rank 0 does that sends it to the others; expect an equal one."""
        self.write({"weight": torch.ones(3)}, path)
        catalog = open_catalog(path)
        assert pickle.loads(pickle.dumps(catalog)) == catalog

    def test_a_file_that_is_cut_off_is_refused(self, path: Path) -> None:
        """Cut the file off; expect an error that names the checkpoint before any weight is read."""
        self.write({"weight": torch.arange(4096.0)}, path)
        catalog = open_catalog(path)
        for file in map(Path, catalog.files):
            content = file.read_bytes()
            # Cut in the header, in the weights, and at the last byte, where only the length tells.
            for length in (0, 1, len(content) // 2, len(content) - 1):
                file.write_bytes(content[:length])
                with pytest.raises(ZerostartError, match=path.name):
                    open_catalog(path)
            # Whole again, for the next file, and to see that nothing else has refused it.
            file.write_bytes(content)
        assert open_catalog(path).weights == catalog.weights

    def test_loads_hold_what_was_written(self, path: Path) -> None:
        """Load on real ranks; expect every tensor bit for bit, and the planned bytes."""
        # Without the tied name, which a load ties again by itself.
        self.write({n: t for n, t in reference().state_dict().items() if n != "head.weight"}, path)
        for world_size in self.worlds:
            plan = zerostart.plan(str(path), world_size, self.engine, model=Net)
            results = on_ranks(loaded_from, world_size, self.imports, str(path), self.engine)
            for rank, (wrong, read) in enumerate(results):
                assert wrong == [], f"rank {rank} of {world_size}"
                assert read == plan.ranks[rank].read_bytes
