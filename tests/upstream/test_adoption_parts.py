"""Fails when upstream moves: the seams of transformers and accelerate that ``enabled`` takes over."""

from typing import Any

import pytest

from tests.ranks import run_ranks
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.accelerate import plugins as ac
from zerostart.upstream.transformers import loading


def test_unknown_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    import transformers

    ac.require.cache_clear()
    monkeypatch.setattr(accelerate, "__version__", "1.0.0")
    with pytest.raises(UnsupportedVersionError, match=r"accelerate 1\.0\.0 is installed"):
        ac.require()
    ac.require.cache_clear()

    def moved(model: Any, files: Any) -> None:
        """With other arguments."""

    loading.require.cache_clear()
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", moved)
    with pytest.raises(
        UnsupportedVersionError,
        match=r"it takes \(model, files\), not \(model, state_dict, .*use zerostart.load",
    ):
        loading.require()
    loading.require.cache_clear()


def test_fully_shard_names_classes_as_expected() -> None:
    """It does so for real on one rank, whose name for the class is what accelerate's are looked up by."""
    assert run_ranks(sharded_class, 1) == [f"{ac.SHARDED}Linear"]


def sharded_class() -> str:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return type(fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))).__name__
