"""Edit a loaded model before ``deepspeed.initialize``; the start must equal the stock route."""

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


def compare_edited(path: Path, case: Case, edit: Edit) -> list[str]:
    """Compare both routes with the same edit before the engine starts."""
    model = routes.stock(path, case)
    reference = edit(model)
    # Our route puts parameters that no load created into a separate group.
    stock_case = replace(case, groups=case.groups + routes.HEAD_SEPARATE) if hasattr(model, "head") else case
    expected = routes.trace_training(model, stock_case)
    model = routes.ours(path, case)
    reference = edit(model)
    lines = routes.differing_keys(routes.trace_training(model, case), expected)
    del reference  # alive until now: a state dict or copy shares or holds the model's memory
    return lines


def add_head(model: nn.Module) -> None:
    """Add a module whose parameters join the client's groups."""
    torch.manual_seed(7)
    head = nn.Linear(6, 5).to(next(model.parameters()).dtype)
    model.add_module("head", head)


def add_adapters(model: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(7 + dist.get_rank())  # the stock route broadcasts rank 0's
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def take_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


def change_one_rank(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in list(model.parameters())[1::3]:
            if dist.get_rank() == 1:
                parameter.data.add_(1)


def permute_one_rank(model: nn.Module) -> None:
    """Reverse the elements of parameters, which leaves their sum unchanged."""
    with torch.no_grad():
        for parameter in list(model.parameters())[1::3]:
            if dist.get_rank() == 1:
                parameter.data.copy_(parameter.data.flip(0))


def tie_two_norms(model: nn.Module) -> None:
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and m.weight.numel() == 24]
    norms[1].weight = norms[0].weight


def move_data(model: nn.Module) -> None:
    """Assign new memory to ``p.data``."""
    for parameter in list(model.parameters())[::4]:
        parameter.data = parameter.data.clone()


def copy_and_clear_copy(model: nn.Module) -> nn.Module:
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    return duplicate


EDITS: dict[str, tuple[str, Edit]] = {
    "a new head": ("decay", add_head),
    "LoRA": ("stage 2", add_adapters),
    "LoRA, BF16_Optimizer": ("BF16_Optimizer, decay", add_adapters),
    "a state dict is kept": ("decay", take_state_dict),
    "one rank differs": ("decay", change_one_rank),
    "one rank's elements change places": ("stage 2", permute_one_rank),
    "tied": ("shuffled, stage 1", tie_two_norms),
    "moved": ("shuffled, stage 1", move_data),
    "a copy": ("decay", copy_and_clear_copy),
}


def check_edits(path: Path) -> dict[str, list[str]]:
    return {name: compare_edited(path, CASES[case], edit) for name, (case, edit) in EDITS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_edited_models_train_like_the_stock_route(world_size: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    for lines_by_edit in run_ranks(check_edits, world_size, path, timeout=300):
        assert not {name: lines for name, lines in lines_by_edit.items() if lines}


def check_kept_views(path: Path) -> list[str]:
    """Check that tensors which share the buffer's memory keep their values when parameters move."""
    lines = []
    case = CASES["shuffled, stage 1"]
    model = routes.ours(path, case)
    state = model.state_dict()
    values = {name: tensor.clone() for name, tensor in state.items()}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostart").addHandler(handler)
    engine = routes.start_engine(model, case)
    lines += [name for name in state if not torch.equal(state[name], values[name])]
    if not any("delete such tensors" in record for record in records):
        lines.append(f"no warning in {records}")
    engine.destroy()
    return lines


@pytest.mark.slow
def test_views_of_the_buffer_are_not_overwritten(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    assert run_ranks(check_kept_views, 1, path) == [[]]
