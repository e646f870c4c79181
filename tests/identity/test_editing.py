"""Read and change one whole parameter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks

EXPERTS, TIED = "model.layers.0.mlp.experts.down_proj", "lm_head.weight"


def numbered(shape: torch.Size) -> torch.Tensor:
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape) % 127 / 64


def edit_and_compare(path: Path, engine: str, options: dict[str, Any], name: str) -> None:
    model = zerostart.load(path, engine=engine, progress=False, **options)
    before = dict(zerostart.full_tensors(model, rank=None))
    last = dist.get_world_size() - 1
    with zerostart.gathered(model, name) as tensor:
        assert torch.equal(tensor, before[name])
    with zerostart.gathered(model, name, modifier_rank=last) as tensor:
        if dist.get_rank() == last:
            tensor.copy_(numbered(tensor.shape))
    after = dict(zerostart.full_tensors(model, rank=None))
    expected = {**before, name: numbered(before[name].shape).to(before[name].dtype)}
    if name == TIED:
        expected["model.embed_tokens.weight"] = expected[name]
    assert [n for n in expected if not torch.equal(after[n], expected[n])] == []


@pytest.mark.parametrize(
    ("kind", "world", "options", "name"),
    [
        ("mixtral", 4, {"expert_parallel": 2}, EXPERTS),
        pytest.param("qwen3_moe", 3, {}, EXPERTS, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, {}, TIED, marks=pytest.mark.slow),
    ],
    ids=["experts", "fused", "tied"],
)
def test_change_reaches_every_shard(
    kind: str, world: int, options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    run_ranks(edit_on_each_engine, world, checkpoint(kind, tmp_path), options, name)


def edit_on_each_engine(path: Path, options: dict[str, Any], name: str) -> None:
    for engine in ("deepspeed", "fsdp2"):
        edit_and_compare(path, engine, options, name)


def edit_without_permission(path: Path, view: str) -> str:
    model = zerostart.load(path, engine="fsdp2", progress=False)
    before = dict(zerostart.full_tensors(model, rank=None))

    def change() -> None:
        with zerostart.gathered(model, TIED, modifier_rank=0 if view == "rank" else None) as tensor:
            if dist.get_rank() == 1:
                target = tensor.numpy() if view == "numpy" else tensor
                target[0, 0] += 1

    with pytest.raises(zerostart.ZerostartError) as caught:
        change()
    after = dict(zerostart.full_tensors(model, rank=None))
    assert all(torch.equal(after[n], before[n]) for n in before)
    with pytest.raises(zerostart.ZerostartError, match=r"did you mean lm_head\.weight"):
        zerostart.gathered(model, "lm_head.weigh").__enter__()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("view", ["tensor", "numpy", "rank"])
def test_undeclared_change_is_an_error_on_all_ranks(view: str, tmp_path: Path) -> None:
    messages = run_ranks(edit_without_permission, 2, checkpoint("qwen3", tmp_path), view)
    assert len(set(messages)) == 1
    assert messages[0].startswith("lm_head.weight was changed on rank 1, and those changes would be lost")


def change_shape_or_dtype() -> dict[str, Any]:
    """Return the errors of forbidden changes."""
    messages: dict[str, Any] = {}
    square = torch.arange(36.0).view(6, 6)
    source = {"square": square, "weight": torch.arange(48.0).view(8, 6)}
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "double": lambda t: setattr(t, "data", t.data.double()),
        "half": lambda t: setattr(t, "data", t.data.half()),
        "bits": lambda t: setattr(t, "data", t.data.view(torch.int32)),
        "larger": lambda t: setattr(t, "data", torch.zeros(3000, 400)),
        "smaller": lambda t: t.resize_(2, 2),
        "transposed": lambda t: t.t_(),
    }
    for stage in (0, 3):
        model = zerostart.load(source, model=Squares, engine="fsdp2", zero_stage=stage, progress=False)
        for name, change in changes.items():
            for victim in (0, 1):  # the modifier rank, and another one
                own_change = change if dist.get_rank() == victim else id
                with pytest.raises(zerostart.ZerostartError) as caught:
                    change_weight(model, own_change)
                messages[f"{name} at {stage} on {victim}"] = str(caught.value)
        with zerostart.gathered(model, "square", modifier_rank=1) as tensor:
            if dist.get_rank() == 1:
                tensor.t_()  # keeps its shape
        after = dict(zerostart.full_tensors(model, rank=None))
        assert torch.equal(after["weight"], source["weight"])
        assert torch.equal(after["square"], square.t())
    return messages


def change_weight(model: torch.nn.Module, change: Callable[[torch.Tensor], Any]) -> None:
    with zerostart.gathered(model, "weight", modifier_rank=0) as tensor:
        change(tensor)


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = torch.nn.Parameter(torch.empty(6, 6))
        self.weight = torch.nn.Parameter(torch.empty(8, 6))


@pytest.mark.slow
def test_change_of_shape_or_dtype_is_an_error() -> None:
    first, second = run_ranks(change_shape_or_dtype, 2)
    assert first == second
    for case, message in first.items():
        assert message.startswith("weight is float32 [8, 6], but came back as "), (case, message)
        assert f"on rank {case[-1]}; the shards were not changed" in message, (case, message)


def call_differently(stage: int) -> list[str]:
    """Pass different, valid arguments on the ranks."""
    rank, messages = dist.get_rank(), []
    source = {"square": torch.arange(36.0).view(6, 6), "weight": torch.arange(48.0).view(8, 6)}
    model = zerostart.load(source, model=Squares, engine="fsdp2", zero_stage=stage, progress=False)

    def change(name: str, modifier: int | None) -> None:
        with zerostart.gathered(model, name, modifier_rank=modifier):
            pass

    for call in (
        lambda: list(zerostart.full_tensors(model, rank)),
        lambda: list(zerostart.full_tensors(model, None if rank else 0)),
        lambda: change("weight", rank),
        lambda: change("weight", 0 if rank else None),
        lambda: change(["square", "weight"][rank], None),
    ):
        with pytest.raises(zerostart.ZerostartError, match="the ranks do not do the same") as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_different_arguments_of_ranks_are_an_error(stage: int) -> None:
    first, second = run_ranks(call_differently, 2, stage)
    assert first == second
    assert "on rank 0' and rank 1 at" in first[0] or "to rank 0' and rank 1 at" in first[0]
    assert "modifier_rank=0" in first[2]
