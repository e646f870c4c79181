"""Fails when upstream moves: what ``zerostart.upstream`` uses is there, and means what we think."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import deepspeed as ds
from zerostart.upstream import torch as pt
from zerostart.upstream import transformers as hf


def test_installed_versions_are_known() -> None:
    hf._check()
    ds.require()
    pt.require()


def test_an_unknown_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    hf._check.cache_clear()
    monkeypatch.setattr(transformers, "__version__", "6.1.0")
    with pytest.raises(UnsupportedVersionError, match=r"transformers 6\.1\.0 is installed; zerostart knows"):
        hf._check()
    hf._check.cache_clear()


def test_an_unknown_deepspeed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ds.require()
    ds._partition_parameters.cache_clear()
    monkeypatch.setattr(sys.modules["deepspeed"], "__version__", "0.21.0")
    with pytest.raises(UnsupportedVersionError, match=r"DeepSpeed 0\.21\.0 is installed; zerostart knows"):
        ds.require()
    ds._partition_parameters.cache_clear()


def test_an_unknown_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pt.require.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.20.0")
    with pytest.raises(UnsupportedVersionError, match=r"torch 2\.20\.0 is installed; zerostart knows"):
        pt.require()
    pt.require.cache_clear()


@pytest.mark.parametrize("glob", ["router", "layers.*.norm", "a.*.b.*"])
def test_dtype_globs_mean_what_the_library_means(glob: str) -> None:
    from transformers.core_model_loading import build_glob_alternation

    theirs, _, _ = build_glob_alternation([glob])
    plan = hf.dtype_plan(SimpleNamespace(_get_dtype_plan=lambda _: {glob: torch.float32}), torch.bfloat16)
    ((ours, _),) = plan
    for name in ("model.router.weight", "layers.3.norm.weight", "layers.norm", "a.1.b.2", "ab", "x.a.y.b.z"):
        assert bool(ours.search(name)) == bool(theirs.search(name)), name
    assert isinstance(ours, re.Pattern)
