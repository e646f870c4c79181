"""Partial edits of a load work like in one process."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerostart
from tests.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}


class Model(nn.Module):
    """Model with one weight for each edit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, 8)
        self.head = nn.Linear(8, 65)
        self.projector = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 65, bias=False) for _ in EDITS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.projector(self.embed(tokens)))


def average_new_rows(w: torch.Tensor) -> None:
    rows = w.data
    rows[-4:] = rows[:-4].mean(dim=0, keepdim=True)


def swap_rows(w: torch.Tensor) -> None:
    first = w.data[3].clone()
    w.data[3] = w.data[60]
    w.data[60] = first


def write_stale_view(w: torch.Tensor) -> None:
    rows = w[2:50]
    w[3] = 7.0
    w.mul_(2)
    w[50:53] = rows[:3]


def write_stale_view_after_exact(w: torch.Tensor) -> None:
    rows = w[2:10]
    w.mul_(2)
    w[50:58] = rows


def double(w: torch.Tensor) -> None:
    w.data = w.data * 2


def zero_columns(w: torch.Tensor) -> None:
    w[:, :4] = 0


def clamp_by_mask(w: torch.Tensor) -> None:
    w[w > 0.5] = 0.5


def zero_unbound_row(w: torch.Tensor) -> None:
    w.unbind(0)[40].zero_()


def edit_inner_views(w: torch.Tensor) -> None:
    w.view(-1)[:32].zero_()
    w.t()[2, 5:40].fill_(3)
    w.reshape(-1, 4)[100:, 1:3].mul_(2)


def augment(w: torch.Tensor) -> None:
    w[7] += 1
    w.data[8:40, 2] *= 3
    w -= 0.5


def replace(w: torch.Tensor) -> None:
    w.data = torch.arange(520.0).view(65, 8)


def add_noise(w: torch.Tensor) -> None:
    w.add_(torch.randn_like(w) * 0.02)


def write_by_out(w: torch.Tensor) -> None:
    torch.mul(w[1], 2, out=w[33])


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "average of rows": average_new_rows,
    "swap": swap_rows,
    "stale": write_stale_view,
    "stale after exact": write_stale_view_after_exact,
    "doubled": double,
    "relu in place": lambda w: nn.functional.relu(w[3:9], inplace=True),
    "dropout in place": lambda w: nn.functional.dropout(w, 0.5, inplace=True),
    "alpha dropout": lambda w: w.copy_(nn.functional.alpha_dropout(w, 0.5, training=True)),
    "by keywords": lambda w: torch.narrow(dim=0, start=3, length=4, input=w).zero_(),
    "columns": zero_columns,
    "masked": clamp_by_mask,
    "unbound": zero_unbound_row,
    "inner": edit_inner_views,
    "augmented": augment,
    "replaced": replace,
    "noise": add_noise,
    "out": write_by_out,
    "row": lambda w: w[5].fill_(1),
    "slice": lambda w: w[40:60].fill_(2),
    "narrow": lambda w: w.narrow(0, 30, 10).zero_(),
    "chunk": lambda w: w.chunk(3)[1].add_(1),
    "split": lambda w: torch.split(w, 10)[6].copy_(torch.ones(5, 8)),
    "column slice": lambda w: w[:, :4].zero_(),
    "clamp": lambda w: w.clamp_(-0.1, 0.1),
    "index_copy": lambda w: w.index_copy_(0, torch.tensor([1, 64]), torch.ones(2, 8)),
    "index_fill": lambda w: w.index_fill_(1, torch.tensor([1, 3]), 2.0),
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "normal rows": lambda w: w.data[-5:].normal_(),
    "uniform columns": lambda w: w.data[:, 2:5].uniform_(),
    "copied": lambda w: w.copy_(torch.ones(65, 8)),
}


def edit_all(model: nn.Module) -> dict[str, str]:
    """Apply each edit to its weight; return errors."""
    errors = {}
    for layer, (name, edit) in zip(model.layers, EDITS.items(), strict=True):
        torch.manual_seed(7)
        try:
            with torch.no_grad():
                edit(layer.weight)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def edit_sharded_and_whole() -> list[str]:
    torch.manual_seed(3)
    unsharded = Model()
    model = zerostart.load(copy.deepcopy(unsharded.state_dict()), model=Model, engine="fsdp2", progress=False)
    for edited_model in (unsharded, model):
        errors = edit_all(edited_model)
        assert errors == {}, errors
    after = dict(zerostart.full_tensors(model, rank=None))
    weights = [after[f"layers.{number}.weight"] for number in range(len(EDITS))]
    pairs = zip(weights, unsharded.layers, EDITS, strict=True)
    return [name for weight, layer, name in pairs if not torch.equal(weight, layer.weight)]


def test_partial_edits_reach_the_shards() -> None:
    assert run_ranks(edit_sharded_and_whole, 2) == [[], []]


def edit_around_gathered() -> list[str]:
    """Edit after ``gathered``, and use foreign tensors."""
    model = zerostart.load(Model().state_dict(), model=Model, engine="fsdp2", progress=False)
    rows = model.head.weight[2:10]
    with zerostart.gathered(model, "head.weight", modifier_rank=0) as tensor:
        if dist.get_rank() == 0:
            tensor.fill_(1)
    assert rows.mean().item() == 1
    before = model.embed.weight.full_tensor()
    with torch.no_grad():
        model.head.weight[3] = 2.0
        model.embed.weight.mul_(rows[1])
    assert torch.equal(model.embed.weight.full_tensor(), before * 2)
    messages = []
    with torch.no_grad():
        for edit in (
            lambda w: torch._foreach_zero_([w[3], w[40]]),
            lambda w: setattr(w, "data", w.data.to(torch.bfloat16)),
            lambda w: setattr(w, "data", torch.ones(8)),
        ):
            with pytest.raises(zerostart.ZerostartError) as caught:
                edit(model.head.weight)
            messages.append(str(caught.value))
    mesh = init_device_mesh("cpu", (2,))
    foreign = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
    (nn.functional.dropout(foreign * 3.0, 0.0) + foreign).sum().backward()
    assert torch.equal(foreign.grad.full_tensor(), torch.full((4, 4), 4.0))
    return messages


def test_views_see_gathered_writes_and_foreign_tensors_work() -> None:
    first, second = run_ranks(edit_around_gathered, 2)
    assert first == second
    assert all(text.startswith("head.weight is sharded by FSDP2, and ") for text in first)


def edit_placeholders() -> None:
    model = zerostart.load(Model().state_dict(), model=Model, engine="deepspeed", progress=False)
    errors = edit_all(model)
    for number, name in enumerate(EDITS):
        weight = f"layers.{number}.weight"
        pattern = (
            re.escape(f"EngineError: {weight} ") + ".*" + re.escape(f"zerostart.gathered(model, '{weight}'")
        )
        assert re.match(pattern, errors.get(name, "")), (name, errors.get(name))
    with torch.no_grad(), pytest.raises(zerostart.ZerostartError, match=r"head\.weight"):
        torch._foreach_zero_([model.head.weight])
    # Reading or moving a placeholder is allowed.
    state = io.BytesIO()
    torch.save(copy.deepcopy(model.state_dict()), state)
    state.seek(0)
    assert torch.load(state, weights_only=True)["head.weight"].numel() == 0
    assert pickle.dumps(model.head.weight.data)
    assert repr(model.head.weight)
    assert repr(model.state_dict())
    model.to("cpu").requires_grad_(True)


def test_edits_of_placeholders_are_refused() -> None:
    run_ranks(edit_placeholders, 2)


def edit_then_initialize() -> None:
    """Edit as the message says, then start the engine."""
    import deepspeed

    original = Model()
    dist.broadcast(original.embed.weight.data, 0)
    model = zerostart.load(original.state_dict(), model=Model, engine="deepspeed", progress=False)
    with zerostart.gathered(model, "embed.weight", modifier_rank=0) as tensor:
        if dist.get_rank() == 0:
            tensor[40:].fill_(2)
    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
        model.head.weight[3:5].zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    engine.backward(engine(torch.arange(8).view(1, 8)).square().mean())
    engine.step()
    after = dict(zerostart.full_tensors(engine, rank=None))
    assert torch.equal(after["embed.weight"][40:], torch.full((25, 8), 2.0))


def test_edited_model_starts_on_zero3() -> None:
    run_ranks(edit_then_initialize, 2)


def load_part(engine: str) -> str:
    model = zerostart.load(Model().state_dict(), model=Model, engine=engine, progress=False)
    torch.manual_seed(9)
    values = Model().projector.state_dict()
    if engine == "deepspeed":
        with pytest.raises(zerostart.ZerostartError) as caught:
            model.projector.load_state_dict(values)
        return str(caught.value)
    model.projector.load_state_dict(values)
    after = dict(zerostart.full_tensors(model, rank=None))
    assert all(torch.equal(after[f"projector.{name}"], tensor) for name, tensor in values.items())
    # Replace a sharded parameter, and tie it by hand.
    model.head.weight = nn.Parameter(torch.randn(65, 8))
    model.embed.weight = model.head.weight
    with pytest.raises(zerostart.ZerostartError) as caught:
        model(torch.arange(8).view(1, 8))
    return str(caught.value)


@pytest.mark.parametrize(("engine", "name"), [("fsdp2", "embed.weight"), ("deepspeed", "projector.0.weight")])
def test_submodule_state_dict_is_loaded_or_refused_by_name(engine: str, name: str) -> None:
    first, second = run_ranks(load_part, 2, engine)
    assert first == second
    assert first.startswith(name)
    assert f"zerostart.gathered(model, '{name}'" in first
