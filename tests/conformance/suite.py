"""Check one identifier of the registry in every shard."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance.checkpoints import (
    changes_prefixes,
    choose,
    keep_prefixes,
    save,
    transpose_checked,
)
from tests.conformance.registry import entries, operations
from tests.conformance.sharded import compare, reference

#: Types that run with the ordinary tests.
NAMED = (
    "deepseek_v3",
    "ernie4_5_vl_moe",
    "glm4_moe",
    "gpt_oss",
    "hrm_text",
    "llama4",
    "nomic_bert",
    "olmo_hybrid",
    "phimoe",
    "qwen3_vl_moe",
)
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class Result:
    """Results of an identifier; ``used`` of its ``entries`` conversions matched a tensor."""

    identifier: str
    model: str
    operations: str
    dtype: str
    layouts: tuple[str, ...]
    used: int
    entries: int
    parameters: int
    tensors: int
    differences: tuple[str, ...]


def dtype_of(identifier: str) -> torch.dtype:
    """Return the dtype of an identifier's checkpoint."""
    return _DTYPES[sum(map(ord, identifier)) % len(_DTYPES)]


@functools.cache
def check(identifier: str) -> Result:
    """Write the identifier's checkpoints, load them in shards and compare.

    Raises Unavailable.
    """
    kind, config = choose(identifier)
    dtype = dtype_of(identifier)
    differences: list[str] = []
    used: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hub"
        result = save(kind, config, path, dtype)
        turned = transpose_checked(result, path)
        layouts = ["transposed" if turned else "hub"]
        tensors = check_one(kind, path, result, layouts[0], differences, used)
        if changes_prefixes(result):
            layouts.append("with prefixes")
            path = Path(folder) / "prefixes"
            result = save(kind, config, path, dtype, keep_prefixes)
            tensors = check_one(kind, path, result, layouts[-1], differences, used)
    own = [str(entry) for entry in entries(identifier)]
    return Result(
        identifier=identifier,
        model=kind.__name__,
        operations=operations(identifier),
        dtype=str(dtype).removeprefix("torch."),
        layouts=tuple(layouts),
        used=sum(entry in used for entry in own),
        entries=len(own),
        parameters=sum(1 for _ in result.parameters()),
        tensors=tensors,
        differences=tuple(differences),
    )


def save_base(kind: Any, config: Any, path: Path) -> tuple[Any, Any]:
    """Write a model into ``head`` and its base into ``base``; return both."""
    head = save(kind, config, path / "head", torch.bfloat16)
    base = head.base_model
    base.save_pretrained(path / "base")
    return head, base


def check_one(kind: Any, path: Path, made: Any, layout: str, differences: list[str], used: set[str]) -> int:
    expected = reference(kind, path)
    used.update(str(entry) for entry in expected.used)
    lines, tensors = compare(kind, path, expected, made)
    differences += [f"{layout}: {line}" for line in lines]
    return tensors
