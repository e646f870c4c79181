"""Leaf modules of DeepSpeed's ZeRO-3: their parameters are gathered together, their gradients reduced so.

``deepspeed.initialize`` puts its hooks on what is a leaf by then: what its section ``leaf_module`` names,
what ``set_z3_leaf_modules`` was called for, and what is marked here.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zerostart.upstream.registry import Lasts, PatchPoint, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
TOUCHED = (
    PatchPoint(
        library=DEEPSPEED,
        owner="deepspeed.utils.z3_leaf_module",
        names=("set_z3_leaf_module", "z3_leaf_module"),
        writes=("_z3_leaf",),
        why="a module of which each rank may run other parts is gathered as one",
        lasts=Lasts.MODEL,
        shapes=(
            Shape("deepspeed.utils.z3_leaf_module:set_z3_leaf_module", has=("model._z3_leaf = flag",)),
            Shape(
                f"{_OFFLOAD}._register_deepspeed_module",
                has=("param.ds_z3_leaf_module = module",),
            ),
        ),
    ),
)


def mark_leaves(modules: Iterable[nn.Module]) -> None:
    """Have DeepSpeed treat each of ``modules`` as a leaf, until ``unset_z3_leaf_modules``."""
    demand(TOUCHED)
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)
