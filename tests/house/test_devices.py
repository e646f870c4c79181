"""A default device of the user (``torch.set_default_device``, ``with torch.device``) is not ours."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._device import _device_constructors

import zerostart
from tests.house.test_structure import TREES
from tests.ranks import run_ranks

#: Rooms whose code is run as a user's would be.
USERS = "zerostart.testing"


def test_every_tensor_that_is_made_says_where() -> None:
    made = {f"torch.{function.__name__}" for function in _device_constructors()}
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name.startswith(USERS):
                continue
            said = {keyword.arg for keyword in node.keywords} & {"device", None}
            if ast.unparse(node.func) in made and not said:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


#: Accelerators and their backends: torch is asked for what there is (``zerostart.distributed.world``).
KINDS = {"cuda", "hip", "xpu", "npu", "mps", "mtia", "hpu", "mlu", "musa", "nccl", "xccl", "hccl", "cncl"}


def test_no_accelerator_is_named() -> None:
    """Neither as the type of a device or a backend nor as a part of torch: what is there is asked for."""
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                said = {node.attr} if ast.unparse(node.value) in {"torch", "torch.backends"} else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = {node.value.partition(":")[0]}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                said = {part for one in modules if one.startswith("torch") for part in one.split(".")}
            else:
                continue
            if said & KINDS:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


class Parts(nn.Module):
    """What is computed, what is initialised, what is tied, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(6, 6, bias=False)
        self.fresh = nn.Linear(5, 5)
        self.register_buffer("table", torch.arange(6.0), persistent=False)


def converter(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = state["first.weight"]
    weight[weight > 0.5] = 0.25
    state["first.weight"] = torch.nn.functional.pad(weight[:, :5], (0, 1), value=3.0).flip(0)
    state["second.weight"][0].mul_(2)
    state["second.weight"] = state["second.weight"] @ torch.nn.functional.one_hot(
        weight[:, :6].argmax(0) % 6, 6
    ).to(weight.dtype)
    return state


def source() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first.weight": (8, 6), "first.bias": (8,), "second.weight": (6, 6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_everywhere(path: Path) -> None:
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        save_file(source(), path)
    dist.barrier()
    expected = converter(source())
    torch.manual_seed(0)
    for engine, stage in (("fsdp2", 3), ("fsdp2", 0), ("deepspeed", 3)):
        for given, exchange in ((path, True), (source(), False)):
            with torch.device("meta"):
                model = zerostart.load(
                    given,
                    Parts,
                    engine=engine,
                    zero_stage=stage,
                    converter=converter,
                    strict=False,
                    exchange=exchange,
                    progress=False,
                )
                with zerostart.gathered(model, "first.bias", modifier_rank=1) as tensor:
                    if dist.get_rank() == 1:
                        tensor.add_(1)
                found = dict(zerostart.full_tensors(model, rank=None))
            wanted = {**expected, "first.bias": expected["first.bias"] + 1}
            assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
            assert found["fresh.weight"].device.type == "cpu"
            assert torch.equal(model.table.cpu(), torch.arange(6.0))


@pytest.mark.slow
def test_a_load_under_a_default_device(tmp_path: Path) -> None:
    run_ranks(load_everywhere, 2, tmp_path / "model.safetensors")
