"""Select modules by class, before and after FSDP2 has sharded them."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.engines.module_names import matching_modules


def test_a_class_name_excludes_subclasses() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "attention": nn.MultiheadAttention(2, 1)})
    assert list(matching_modules(model, ["Linear"], "wrap has")) == ["fc"]
    model["fc"].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert list(matching_modules(model, ["Linear"], "wrap has")) == ["fc"]
