"""Check that code names the devices of its tensors, and no kind of accelerator."""

import ast

from torch.utils._device import _device_constructors

from tests.house.test_structure import TREES

#: Code that runs with the user's default device, like a user's own.
USER_CODE = "zerostart.testing"


def test_every_new_tensor_names_its_device() -> None:
    constructors = {f"torch.{function.__name__}" for function in _device_constructors()}
    violations = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name.startswith(USER_CODE):
                continue
            has_device = {keyword.arg for keyword in node.keywords} & {"device", None}
            if ast.unparse(node.func) in constructors and not has_device:
                violations.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert violations == []


#: Accelerators and their backends; code asks torch instead (``zerostart.distributed.world``).
KINDS = {"cuda", "hip", "xpu", "npu", "mps", "mtia", "hpu", "mlu", "musa", "nccl", "xccl", "hccl", "cncl"}


def test_no_accelerator_is_named() -> None:
    """Look for device types, backends and submodules of torch."""
    violations = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                words = {node.attr} if ast.unparse(node.value) in {"torch", "torch.backends"} else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = {node.value.partition(":")[0]}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                words = {
                    part for module in modules if module.startswith("torch") for part in module.split(".")
                }
            else:
                continue
            if words & KINDS:
                violations.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert violations == []
