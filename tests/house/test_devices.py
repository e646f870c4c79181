"""A default device of the user (``torch.set_default_device``, ``with torch.device``) is not ours."""

import ast

from torch.utils._device import _device_constructors

from tests.house.test_structure import TREES

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
