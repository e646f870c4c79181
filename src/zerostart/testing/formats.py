"""Conformance suite for checkpoint formats.

class TestMine(FormatConformance):
    format = "mine"
    imports = ("my_package.my_format",)

    def write(self, tensors, path):
        my_package.save(tensors, path)
"""

from __future__ import annotations

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
from zerostart.testing.ranks import check_loads, reference, save


class FormatConformance(ABC):
    """Tests of a format; a subclass sets ``format`` and implements ``write``."""

    #: Name of the format, which the test module registers.
    format: ClassVar[str]
    #: Modules that register the format; the ranks import them first.
    imports: ClassVar[tuple[str, ...]] = ()
    #: True if ``write`` writes a file and not a directory.
    single_file: ClassVar[bool] = False
    #: Supported dtypes.
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.int64)
    #: World sizes and engine of the real loads.
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
        """Expect the format to recognise only its own files."""
        assert self.format in [format_.name for format_ in formats()]
        self.write({"weight": torch.ones(3)}, path)
        assert format_of(path).name == self.format
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        save(tmp_path / "other" / "model.safetensors")
        for other in ("empty", "other", "other/model.safetensors"):
            assert format_of(tmp_path / other).name != self.format, other

    def test_tensors_are_where_the_catalog_says(self, path: Path) -> None:
        """Expect correct names, dtypes, shapes and bytes of tensors in the catalog."""
        tensors = {}
        for number, dtype in enumerate(self.dtypes):
            for shape in ((), (1,), (5,), (3, 4), (2, 3, 5)):
                values = torch.arange(torch.Size(shape).numel()).reshape(shape) + number
                # Names with dtype and shape, so that failures are readable.
                tensors[f"{dtype}.{len(shape)}.{shape}".replace("torch.", "")] = values.to(dtype)
        self.write(tensors, path)
        catalog = open_catalog(path)
        described = {name: (entry.dtype, entry.shape) for name, entry in catalog.weights.items()}
        assert described == {name: (spelling(t.dtype, name), tuple(t.shape)) for name, t in tensors.items()}
        copy = path.parent / "copy.safetensors"
        save_file(tensors, copy)
        difference = zerostart.diff(str(path), str(copy))
        assert sorted(difference.equal) == sorted(tensors)
        assert not difference.differing

    def test_a_file_that_is_cut_off_is_refused(self, path: Path) -> None:
        """Truncate the files; expect an error that names the checkpoint, before a read."""
        self.write({"weight": torch.arange(4096.0)}, path)
        catalog = open_catalog(path)
        for file in map(Path, catalog.files):
            content = file.read_bytes()
            # In the header, in the weights, and at the last byte, which only the length reveals.
            for length in (0, 1, len(content) // 2, len(content) - 1):
                file.write_bytes(content[:length])
                with pytest.raises(ZerostartError, match=path.name):
                    open_catalog(path)
            # Restore the file for the next one, and for the check below.
            file.write_bytes(content)
        assert open_catalog(path).weights == catalog.weights

    def test_loads_hold_what_was_written(self, path: Path) -> None:
        """Load on real ranks; expect every tensor bit for bit, and the planned bytes."""
        # Without the tied name, which a load ties again.
        self.write({n: t for n, t in reference().state_dict().items() if n != "head.weight"}, path)
        check_loads(self.worlds, self.imports, str(path), self.engine)
