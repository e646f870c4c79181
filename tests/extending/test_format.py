"""A format that zerostart does not know passes what formats have to pass; so does its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.extending import toy_format
from zerostart import errors
from zerostart.checkpoint.formats import Format, base, format_of, formats, register_format
from zerostart.checkpoint.formats.dcp import TorchDistributed
from zerostart.testing import FormatConformance


class TestColumns(FormatConformance):
    """The toy format."""

    format = "columns"
    imports = ("tests.extending.toy_format",)

    def write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        """As its own module does."""
        toy_format.write(tensors, path)


class TestTorchDistributed(FormatConformance):
    """A format of zerostart's own, whose tensors lie in the shares of ranks."""

    format = "dcp"

    def write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        """One rank's share, which is all of it."""
        import torch.distributed.checkpoint as dcp

        dcp.save(dict(tensors), checkpoint_id=str(path), no_dist=True)


def test_the_order_in_which_formats_are_asked() -> None:
    """Others' formats, then what zerostart wrote, pipelines, shares of ranks, and last files of weights."""
    own = ["state", "pipeline", "dcp", "universal", "zero", "weights"]
    assert [format_.name for format_ in formats()] == ["columns", *own]


def test_weights_go_before_shares_of_ranks(tmp_path: Path) -> None:
    """A directory that a training run left, into which somebody has exported the model since."""
    (tmp_path / ".metadata").write_bytes(b"")
    assert isinstance(format_of(tmp_path), TorchDistributed)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert format_of(tmp_path).name == "weights"


def test_names_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same class is once; another class of that name is refused, and so are our own names."""
    monkeypatch.setattr(base, "_registered", dict(base._registered))
    assert register_format(toy_format.Columns) is toy_format.Columns
    for name in ("columns", "weights"):
        other = type("Other", (toy_format.Columns,), {"name": name})
        with pytest.raises(errors.ConfigError, match=f"named {name!r} is already registered"):
            register_format(other)


def test_installed_formats_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entry points of other packages; one that cannot be imported is named."""
    points = [EntryPoint("columns", "tests.extending.toy_format:Columns", base.GROUP)]
    monkeypatch.setattr(base, "_registered", dict[str, Format]())
    monkeypatch.setattr(base, "entry_points", lambda **_: points)
    try:
        base._installed.cache_clear()
        assert formats()[0].name == "columns"
        points[:] = [EntryPoint("broken", "nowhere_at_all:Format", base.GROUP)]
        base._installed.cache_clear()
        with pytest.raises(errors.ConfigError, match=r"the format broken .* cannot be imported"):
            formats()
    finally:
        base._installed.cache_clear()
