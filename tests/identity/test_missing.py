"""Missing tensors are initialised like in unsharded loads."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.identity.snapshots import ties_of
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import edit_tensors

SEED = 1234
#: Options of each model, and the tensors to delete from its checkpoint.
MODELS: Mapping[str, tuple[dict[str, Any], str]] = {
    "qwen3_moe": (
        {"tie_word_embeddings": True},
        r"layers\.0\.(mlp\.experts\.\d+\.(gate|up)_proj|mlp\.gate|input_layernorm|self_attn\.q_proj)\.weight",
    ),
    "gpt_oss": (
        {},
        r"layers\.1\.(mlp\.experts\.down_proj(_bias)?|self_attn\.(sinks|o_proj\.bias))$|^lm_head",
    ),
    "deepseek_v3": ({}, r"layers\.1\.(mlp\.gate\.e_score_correction_bias|self_attn\.q_b_proj\.weight)"),
}
EXPERTS, TENSORS = {"expert_parallel": 2}, {"tensor_parallel": 2}
AXES: Mapping[str, dict[str, Any]] = {
    "plain at 3": {"engine": "deepspeed"},
    "plain on fsdp2": {"engine": "fsdp2"},
    "experts at 3": {"engine": "deepspeed", **EXPERTS},
    "experts at 2": {"engine": "deepspeed", "zero_stage": 2, **EXPERTS},
    "experts on fsdp2": {"engine": "fsdp2", **EXPERTS},
    "tensors on fsdp2": {"engine": "fsdp2", **TENSORS},
    "both on fsdp2": {"engine": "fsdp2", **EXPERTS, **TENSORS},
}
#: DeepSpeed supports no tensor parallelism for models with experts.
DENSE = "qwen3"
MODELS_OF_DEEPSPEED = {
    DENSE: ({}, r"layers\.0\.(self_attn\.[qo]_proj|mlp\.down_proj|input_layernorm)\.weight|^lm_head")
}
AXES_OF_DEEPSPEED: Mapping[str, dict[str, Any]] = {
    "tensors at 2": {"engine": "deepspeed", "zero_stage": 2, **TENSORS},
    "tensors at 3": {"engine": "deepspeed", **TENSORS},
}


def write_incomplete(kind: str, folder: Path) -> Path:
    options, pattern = {**MODELS, **MODELS_OF_DEEPSPEED}[kind]
    path = checkpoint(kind, folder, **options)

    def delete(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if re.search(pattern, name)]
        assert names
        for name in names:
            del tensors[name]

    edit_tensors(path, delete)
    return path


def compare(path: Path, cases: list[str]) -> list[str]:
    """List differences to transformers after the same seed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    stock, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    expected, ties = stock.state_dict(), ties_of(stock)
    unsaved = {name: buffer for name, buffer in stock.named_buffers() if name not in expected}
    lines = []
    for case in cases:
        torch.manual_seed(SEED)
        model = zerostart.load(
            path, type(stock), strict=False, progress=False, **{**AXES, **AXES_OF_DEEPSPEED}[case]
        )
        have = {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}
        lines += [f"{case}: names" for _ in [0] if have.keys() != expected.keys()]
        lines += [f"{case}: {n}" for n in expected if n in have and not torch.equal(have[n], expected[n])]
        buffers = dict(model.named_buffers())
        lines += [f"{case}: {n}" for n in unsaved if not torch.equal(buffers[n], unsaved[n])]
        lines += [f"{case}: ties {ties_of(model)}" for _ in [0] if ties_of(model) != ties]
        missing = set(zerostart.report(model).missing)
        lines += [f"{case}: missing {missing}" for _ in [0] if missing != info["missing_keys"]]
        initialised = set(zerostart.report(model).initialised)
        lines += [f"{case}: initialised {initialised}" for _ in [0] if not initialised <= missing]
    return lines


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("qwen3_moe", ["plain at 3", "plain on fsdp2", "experts at 3", "tensors on fsdp2"]),
        pytest.param(DENSE, list(AXES_OF_DEEPSPEED), marks=pytest.mark.slow),
        *(pytest.param(kind, list(AXES), marks=pytest.mark.slow) for kind in MODELS),
    ],
)
def test_missing_tensors_are_initialised_like_unsharded(kind: str, cases: list[str], tmp_path: Path) -> None:
    assert run_ranks(compare, 2, write_incomplete(kind, tmp_path), cases) == [[], []]
