"""``strict=False``: what the checkpoint lacks is initialised as transformers does, on any world size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from snapshots import engine_state, pretrained, same_bits

import zerostart
from ranks import run_ranks
from tiny import TinyCheckpoints, minilm_path

SEED = 1234
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def head_missing() -> tuple[Path, str, set[str]]:
    """MiniLM has a pooler and no language-model head; as a masked language model it lacks the head."""
    missing = {
        "cls.predictions.bias",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
    }
    return minilm_path(), "BertForMaskedLM", missing


@pytest.fixture(scope="module")
def tensors_deleted(checkpoints: TinyCheckpoints) -> tuple[Path, str, set[str]]:
    """A tiny Qwen3-MoE without one norm, one projection and every expert's gate of one layer."""
    lost = ("layers.0.input_layernorm.weight", "layers.1.self_attn.q_proj.weight")

    def delete(tensors: State) -> None:
        for name in list(tensors):
            if name.endswith(lost) or ("layers.2.mlp.experts." in name and "down_proj" not in name):
                del tensors[name]

    path = checkpoints.edited(checkpoints("qwen3_moe"), "qwen3_moe-deleted", delete)
    missing = {f"model.{name}" for name in lost} | {"model.layers.2.mlp.experts.gate_up_proj"}
    return path, "Qwen3MoeForCausalLM", missing


@pytest.fixture(params=["head_missing", "tensors_deleted"])
def lacking(request: pytest.FixtureRequest) -> tuple[Path, str, set[str]]:
    chosen: tuple[Path, str, set[str]] = request.getfixturevalue(request.param)
    return chosen


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_initialised_alike_on_every_world_size(
    lacking: tuple[Path, str, set[str]], engine: str, deepspeed_op: None
) -> None:
    path, class_name, missing = lacking
    torch.manual_seed(SEED)
    reference = pretrained(path, None, class_name).state_dict()
    states = []
    for world_size in (1, 2, 3):
        values = run_ranks(load_lacking, world_size, path, class_name, engine, SEED)
        for _, report in values:
            assert set(report["missing"]) == missing
            assert set(report["initialised"]) >= missing
        assert all(state.keys() == reference.keys() for state, _ in values)
        states.append(values[0][0])
    for name, tensor in reference.items():
        if name not in missing:
            assert same_bits(states[0][name], tensor), f"{name} is in the checkpoint, and differs"
        for state in states[1:]:
            assert same_bits(state[name], states[0][name]), f"{name} depends on the world size"


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_initialised_as_transformers_does(
    lacking: tuple[Path, str, set[str]], engine: str, deepspeed_op: None
) -> None:
    path, class_name, _ = lacking
    torch.manual_seed(SEED)
    reference = pretrained(path, None, class_name).state_dict()
    state, _ = run_ranks(load_lacking, 2, path, class_name, engine, SEED)[0]
    for name, tensor in reference.items():
        assert same_bits(state[name], tensor), f"{name} differs from transformers' for the same seed"


def test_the_seed_matters_and_nothing_else(
    head_missing: tuple[Path, str, set[str]], deepspeed_op: None
) -> None:
    path, class_name, _ = head_missing
    name = "cls.predictions.transform.dense.weight"
    one, again, other = (
        run_ranks(load_lacking, 1, path, class_name, "fsdp2", seed)[0][0][name] for seed in (1, 1, 2)
    )
    assert same_bits(one, again)
    assert not same_bits(one, other)


def load_lacking(path: Path, class_name: str, engine: str, seed: int) -> tuple[State, dict[str, list[str]]]:
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, class_name)
    model = zerostart.load(path, kind, engine=engine, strict=False, progress=False)
    report = zerostart.report(model)
    names = {"missing": list(report.missing), "initialised": list(report.initialised)}
    return engine_state(model, engine), names
