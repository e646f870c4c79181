"""Load from a mapping that every rank holds."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart import errors
from zerostart.checkpoint.memory import memory_catalog
from zerostart.live.report import Report


def change(change_kind: str, tensor: torch.Tensor) -> None:
    if change_kind == "in place":
        tensor.add_(1)
    elif change_kind == "data":
        tensor.data = torch.ones(8)
    elif change_kind == "view":
        tensor.data = tensor.data[:1].expand(8)
    else:
        tensor.data.resize_(64)


@pytest.mark.parametrize("change_kind", ["in place", "data", "view", "resized"])
def test_changed_tensors_are_not_read_again(change_kind: str) -> None:
    tensors = {"w": torch.zeros(8), "other": torch.zeros(3)}
    catalog = memory_catalog(tensors)
    storage = catalog.storage.detach({catalog.tensors["w"].file})
    assert storage.reattach("wanted").reader() is not None
    change(change_kind, tensors["w"])
    with pytest.raises(errors.ReadError, match=r"the tensor w was changed in place since .*, wanted"):
        storage.reattach("wanted")


class WrapperTensor(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    @staticmethod
    def __new__(cls) -> "WrapperTensor":
        return torch.Tensor._make_wrapper_subclass(cls, (2,))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "is a int"),
        (None, "is a NoneType"),
        ([1.0], "is a list"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (WrapperTensor(), "is a WrapperTensor"),
    ],
)
def test_other_values_are_refused(value: Any, message: str) -> None:
    for call in (zerostart.plan, lambda source, model: zerostart.load(source, model)):
        with pytest.raises(errors.ConfigError, match=message) as caught:
            call({"fine": torch.ones(1), "bad.weight": value}, model=small_model)
        assert "'bad.weight'" in str(caught.value)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))


def large_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024), nn.Linear(1024, 1023))


def load(source: Any, model: Any, engine: str, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    loaded_model = zerostart.load(source, model, engine=engine, progress=False, **options)
    return dict(zerostart.full_tensors(loaded_model, rank=None)), zerostart.report(loaded_model)


def differing_names(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[str]:
    assert list(got) == list(want)
    return [name for name, t in want.items() if got[name].dtype != t.dtype or not torch.equal(got[name], t)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_load_from_a_mapping_on_every_rank(engine: str, size: int, checkpoints: TinyCheckpoints) -> None:
    """Covers conversions, tied weights, casts, views and converters."""
    sources = [checkpoints("qwen3_moe"), checkpoints("qwen3")]
    for differences in run_ranks(load_all, size, engine, sources):
        assert differences == []


def load_all(engine: str, sources: list[Path]) -> list[str]:
    import transformers
    from safetensors.torch import load_file

    differences = []
    for path, dtype in zip(sources, (None, torch.bfloat16), strict=True):
        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, config.architectures[0])
        expected = kind.from_pretrained(path, dtype=dtype or "auto").state_dict()
        tensors = load_file(path / "model.safetensors")
        actual, report = load(tensors, lambda k=kind, c=config: k(c), engine, dtype=dtype)
        differences += [f"{path.name} {name}" for name in differing_names(actual, expected)]
        assert report.read_bytes == report.planned_bytes
    return differences + [f"plain {name}" for name in load_views(engine)]


def load_views(engine: str) -> list[str]:
    """Load renamed views of one buffer in several chunks."""
    expected = large_model().state_dict()
    stored = {f"net.{name}": (t.t().contiguous().t() if t.dim() == 2 else t) for name, t in expected.items()}

    def converter(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("net."): tensor for name, tensor in state.items()}

    dist.broadcast_object_list(box := [stored])
    stored = box[0]
    expected = {name.removeprefix("net."): t.contiguous() for name, t in stored.items()}
    source = MappingProxyType(stored)
    actual, _ = load(source, large_model, engine, converter=converter, chunk_size=1 << 16)
    return differing_names(actual, expected)
