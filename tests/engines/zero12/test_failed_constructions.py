"""An engine whose construction fails half-way leaves no traceback of its destructor, hook or buffer."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engines.zero12 import routes
from tests.engines.zero12.routes import CASES, Case
from tests.ranks import rank_outcomes
from tests.tiny import TinyCheckpoints

ENGINES = {"DeepSpeedEngine", "DeepSpeedZeroOptimizer", "BF16_Optimizer", "FP16_Optimizer"}


class Failed(Exception):
    """What the tests raise in the middle of a construction."""


def no_scheduler(model: nn.Module, case: Case) -> dict[str, Any]:
    """Late: the optimizer is there."""
    return {"config": routes.config_of(case) | {"scheduler": {"type": "NoSuchScheduler", "params": {}}}}


def failing_states(model: nn.Module, case: Case) -> dict[str, Any]:
    """Half-way through DeepSpeedZeroOptimizer's constructor, which makes an Adagrad anew for its states."""
    optimizer = torch.optim.Adagrad(routes.grouped(model, case.groups), lr=1e-3)
    optimizer.defaults["lr"] = -1.0
    return {"optimizer": optimizer}


def wrong_batch(model: nn.Module, case: Case) -> dict[str, Any]:
    """Early: before the engine looks at the model."""
    return {"config": routes.config_of(case) | {"train_batch_size": 7}}


def failing_scheduler(model: nn.Module, case: Case) -> dict[str, Any]:
    """Late, in the client's own function."""

    def make(optimizer: Any) -> Any:
        raise Failed("no schedule")

    return {"lr_scheduler": make}


FAILURES: dict[str, Callable[[nn.Module, Case], dict[str, Any]]] = {
    "no scheduler": no_scheduler,
    "failing states": failing_states,
    "wrong batch": wrong_batch,
    "failing scheduler": failing_scheduler,
}


def initialized(model: nn.Module, case: Case, fail: Callable[[nn.Module, Case], dict[str, Any]]) -> str:
    """The error of a construction that fails; nothing of it is held here."""
    import deepspeed

    given: dict[str, Any] = {"config": routes.config_of(case), **fail(model, case)}
    if "optimizer" not in given:
        given["optimizer"] = torch.optim.AdamW(routes.grouped(model, case.groups), lr=1e-3)
    try:
        deepspeed.initialize(model=model, **given)
    except (Exception, SystemExit) as error:
        return type(error).__name__
    return ""


def left(model: nn.Module, before: set[int]) -> list[str]:
    """What a failed construction has left behind: objects, hooks, and tensors that were not there."""
    gc.collect()
    lines = [type(o).__name__ for o in gc.get_objects() if type(o).__name__ in ENGINES]
    for name, module in model.named_modules():
        if module._forward_pre_hooks or module._forward_hooks or module._backward_hooks:
            lines.append(f"a hook on the module {name}")
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
            lines.append(f"a hook on {name}")
        if parameter.grad is not None:
            lines.append(f"a gradient of {name}")
    lines += [f"a buffer of {nbytes} bytes" for key, nbytes in held() if key not in before]
    return lines


def held() -> list[tuple[int, int]]:
    """Address and size of the storages of 4 KiB and more that tensors hold."""
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return [(address, nbytes) for address, nbytes in found.items() if nbytes >= 4096]


def check(path: Path, name: str) -> list[str]:
    case, lines = CASES[name], []
    for kind, fail in FAILURES.items():
        model = routes.ours(path, case)
        gc.collect()
        before = {address for address, _ in held()}
        if kind == "failing states" and name.startswith("BF16"):
            continue  # That optimizer leaves the states to the first step.
        if not initialized(model, case, fail):
            lines.append(f"{kind}: nothing was raised")
        lines += [f"{kind}: {line}" for line in left(model, before)]
        wanted = routes.followed(routes.stock(path, case), case)
        lines += [f"{kind}, then: {line}" for line in routes.differing(routes.followed(model, case), wanted)]
        dist.barrier()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BF16_Optimizer, decay", "decay", "offloaded", "stage 2 in fp32"])
def test_a_failing_construction_leaves_nothing(name: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    for outcome in rank_outcomes(check, 2, path, name, timeout=200):
        assert outcome.ok, outcome.describe()
        assert outcome.value == []
        assert "Exception ignored" not in outcome.log
        assert "Traceback" not in outcome.log
