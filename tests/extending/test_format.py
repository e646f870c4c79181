"""Run the conformance tests on a format of another package, and on DCP."""

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
    format = "columns"
    imports = ("tests.extending.toy_format",)

    def write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        toy_format.write(tensors, path)


class TestTorchDistributed(FormatConformance):
    """Run on DCP, whose files hold the shares of ranks."""

    format = "dcp"

    def write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(dict(tensors), checkpoint_id=str(path), no_dist=True)


def test_order_of_formats() -> None:
    """Other packages' formats precede zerostart's own."""
    own = ["state", "pipeline", "dcp", "universal", "zero", "weights"]
    assert [format_.name for format_ in formats()] == ["columns", *own]


def test_weights_take_precedence_over_shares_of_ranks(tmp_path: Path) -> None:
    """Use a model that was exported into the directory of a training run."""
    (tmp_path / ".metadata").write_bytes(b"")
    assert isinstance(format_of(tmp_path), TorchDistributed)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert format_of(tmp_path).name == "weights"


def test_names_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the same class again, and refuse another class with its name."""
    monkeypatch.setattr(base._registry, "registered", dict(base._registry.registered))
    assert register_format(toy_format.Columns) is toy_format.Columns
    for name in ("columns", "weights"):
        other = type("Other", (toy_format.Columns,), {"name": name})
        with pytest.raises(errors.ConfigError, match=f"named {name!r} is already registered"):
            register_format(other)


def test_installed_formats_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read entry points, and name one that cannot be imported."""
    monkeypatch.setattr(base._registry, "registered", dict[str, type[Format]]())
    point = EntryPoint("columns", "tests.extending.toy_format:Columns", base.GROUP)
    monkeypatch.setitem(vars(base._registry), "installed", {"columns": point})
    assert formats()[0].name == "columns"
    broken = EntryPoint("broken", "nowhere_at_all:Format", base.GROUP)
    monkeypatch.setitem(vars(base._registry), "installed", {"broken": broken})
    with pytest.raises(errors.ConfigError, match=r"a format 'broken' .* cannot be imported"):
        formats()
