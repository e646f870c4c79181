"""What clients do between the load and ``deepspeed.initialize``: the flat buffer follows, or steps aside."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engines.zero12 import routes
from tests.engines.zero12.routes import CASES, Case
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

Edit = Callable[[nn.Module], Any]


def edited(path: Path, case: Case, edit: Edit) -> list[str]:
    """Both routes, with the same done to the model before the engine starts."""
    model = routes.stock(path, case)
    kept = edit(model)
    # What no load made is a group of its own on our route, whatever the client's groups are.
    apart = replace(case, groups=case.groups + routes.APART) if hasattr(model, "head") else case
    wanted = routes.followed(model, apart)
    model = routes.ours(path, case)
    kept = edit(model)
    lines = routes.differing(routes.followed(model, case), wanted)
    del kept
    return lines


def with_head(model: nn.Module) -> None:
    """A new module whose parameters join the client's groups."""
    torch.manual_seed(7)
    head = nn.Linear(6, 5).to(next(model.parameters()).dtype)
    model.add_module("head", head)


def with_adapters(model: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(7 + dist.get_rank())  # Stock sends rank 0's to all.
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def keeping_a_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


def changed_on_one_rank(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in list(model.parameters())[1::3]:
            if dist.get_rank() == 1:
                parameter.data.add_(1)


def swapped_on_one_rank(model: nn.Module) -> None:
    """Elements that change places: no sum of bits shows it."""
    with torch.no_grad():
        for parameter in list(model.parameters())[1::3]:
            if dist.get_rank() == 1:
                parameter.data.copy_(parameter.data.flip(0))


def retied(model: nn.Module) -> None:
    """One parameter in the place of another."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and m.weight.numel() == 24]
    norms[1].weight = norms[0].weight


def unshared(model: nn.Module) -> None:
    """A parameter with data of its own, as ``p.data = ...`` leaves it."""
    for parameter in list(model.parameters())[::4]:
        parameter.data = parameter.data.clone()


def copied(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


EDITS: dict[str, tuple[str, Edit]] = {
    "a new head": ("decay", with_head),
    "LoRA": ("stage 2", with_adapters),
    "LoRA, BF16_Optimizer": ("BF16_Optimizer, decay", with_adapters),
    "a state dict is kept": ("decay", keeping_a_state_dict),
    "one rank differs": ("decay", changed_on_one_rank),
    "one rank's elements change places": ("stage 2", swapped_on_one_rank),
    "tied": ("shuffled, stage 1", retied),
    "moved": ("shuffled, stage 1", unshared),
    "a copy": ("decay", copied),
}


def check_edits(path: Path) -> dict[str, list[str]]:
    return {name: edited(path, CASES[case], edit) for name, (case, edit) in EDITS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_edited_models_start_as_on_the_stock_route(world_size: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    for found in run_ranks(check_edits, world_size, path, timeout=300):
        assert not {name: lines for name, lines in found.items() if lines}


def check_kept_views(path: Path) -> list[str]:
    """What shares the buffer's memory keeps its values, though the parameters have to move."""
    lines = []
    case = CASES["shuffled, stage 1"]
    model = routes.ours(path, case)
    state = model.state_dict()
    values = {name: tensor.clone() for name, tensor in state.items()}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostart").addHandler(handler)
    engine = routes.started(model, case)
    lines += [name for name in state if not torch.equal(state[name], values[name])]
    if not any("delete such tensors" in record for record in records):
        lines.append(f"no warning in {records}")
    engine.destroy()
    return lines


@pytest.mark.slow
def test_views_that_were_kept_are_not_overwritten(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    assert run_ranks(check_kept_views, 1, path) == [[]]
