"""Pure integers: boxes, row-major ranges, strided pieces and the copies between them."""

from zerostart.geometry.copies import (
    Box,
    Copy,
    Loop,
    copies_between,
    is_one_run,
    merge_runs,
    row_major_boxes,
)
from zerostart.geometry.digits import row_major_strides, simplify
from zerostart.geometry.pieces import (
    Piece,
    broadcast,
    concatenate,
    crop,
    insert_axis,
    join_runs,
    permute,
    reshape,
    shift,
    stack,
    whole,
)
from zerostart.geometry.regions import Region, regions, split_region
from zerostart.geometry.tiling import subtract_box, view_within

__all__ = [
    "Box",
    "Copy",
    "Loop",
    "Piece",
    "Region",
    "broadcast",
    "concatenate",
    "copies_between",
    "crop",
    "insert_axis",
    "join_runs",
    "merge_runs",
    "permute",
    "regions",
    "reshape",
    "is_one_run",
    "row_major_boxes",
    "row_major_strides",
    "shift",
    "simplify",
    "split_region",
    "stack",
    "view_within",
    "whole",
    "subtract_box",
]
