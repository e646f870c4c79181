"""A mapping of tensors as the source, held by every rank."""

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


def changed_in(how: str, tensor: torch.Tensor) -> None:
    if how == "in place":
        tensor.add_(1)
    elif how == "data":
        tensor.data = torch.ones(8)
    elif how == "view":
        tensor.data = tensor.data[:1].expand(8)
    else:
        tensor.data.resize_(64)


@pytest.mark.parametrize("how", ["in place", "data", "view", "resized"])
def test_what_has_changed_since_is_not_read_again(how: str) -> None:
    tensors = {"w": torch.zeros(8), "other": torch.zeros(3)}
    catalog = memory_catalog(tensors)
    storage = catalog.storage.kept({catalog.tensors["w"].file})
    assert storage.recalled("wanted").reader() is not None
    changed_in(how, tensors["w"])
    with pytest.raises(errors.ReadError, match=r"the tensor w was changed in place since .*, wanted"):
        storage.recalled("wanted")


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    @staticmethod
    def __new__(cls) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, (2,))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (3, "is a int"),
        (None, "is a NoneType"),
        ([1.0], "is a list"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (Wrapped(), "is a Wrapped"),
    ],
)
def test_values_that_are_no_plain_tensors(value: Any, what: str) -> None:
    for call in (zerostart.plan, lambda source, model: zerostart.load(source, model)):
        with pytest.raises(errors.ConfigError, match=what) as caught:
            call({"fine": torch.ones(1), "bad.weight": value}, model=plain)
        assert "'bad.weight'" in str(caught.value)


# Models that need no configuration file.


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024), nn.Linear(1024, 1023))


def loaded(source: Any, model: Any, engine: str, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    made = zerostart.load(source, model, engine=engine, progress=False, **options)
    return dict(zerostart.full_tensors(made, rank=None)), zerostart.report(made)


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    assert list(found) == list(wanted)
    return [
        name for name, t in wanted.items() if found[name].dtype != t.dtype or not torch.equal(found[name], t)
    ]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_loaded_from_a_mapping_on_every_rank(engine: str, world: int, checkpoints: TinyCheckpoints) -> None:
    """A registered conversion, a tied model in another dtype, a plain model with views and a converter."""
    sources = [checkpoints("qwen3_moe"), checkpoints("qwen3")]
    for lines in run_ranks(load_all, world, engine, sources):
        assert lines == []


def load_all(engine: str, sources: list[Path]) -> list[str]:
    import transformers
    from safetensors.torch import load_file

    lines = []
    for path, dtype in zip(sources, (None, torch.bfloat16), strict=True):
        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, config.architectures[0])
        wanted = kind.from_pretrained(path, dtype=dtype or "auto").state_dict()
        tensors = load_file(path / "model.safetensors")
        found, report = loaded(tensors, lambda k=kind, c=config: k(c), engine, dtype=dtype)
        lines += [f"{path.name} {name}" for name in differing(found, wanted)]
        assert report.read_bytes == report.planned_bytes
    return lines + [f"plain {name}" for name in load_views(engine)]


def load_views(engine: str) -> list[str]:
    """Views of one buffer under other names, through a converter, in reads of many messages."""
    wanted = large().state_dict()
    stored = {f"net.{name}": (t.t().contiguous().t() if t.dim() == 2 else t) for name, t in wanted.items()}

    def converter(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("net."): tensor for name, tensor in state.items()}

    dist.broadcast_object_list(box := [stored])
    stored = box[0]
    wanted = {name.removeprefix("net."): t.contiguous() for name, t in stored.items()}
    source = MappingProxyType(stored)
    found, _ = loaded(source, large, engine, converter=converter, chunk_size=1 << 16)
    return differing(found, wanted)
