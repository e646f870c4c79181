"""What DeepSpeed's ranks cannot share of tensors is refused on every rank, before anything is read."""

from pathlib import Path
from typing import Any

import pytest

import zerostart
from tests.engines.tensors.sharing import SHARING, Case, config_of, loaded
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import EngineError


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **settings}}


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_model": "qwen2"}}},
        "leaves ranks without a part of model.layers.0.self_attn.q_proj.weight",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_model": "bloom"}}},
        "DeepSpeed cuts no layer of Qwen3MoeForCausalLM",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"autotp_size": 4}}},
        "autotp_size=4; use one number for both",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_modell": "qwen2"}}},
        "DeepSpeed refuses engine_config['tensor_parallel']",
    ),
    (
        {
            "tensor_parallel": 2,
            "engine_config": {
                "tensor_parallel": {"preset_model": "qwen2"},
                "tp_plan": {"head": "colwise"},
            },
        },
        "both tp_plan and a preset_model in tensor_parallel",
    ),
    (
        {"tensor_parallel": 2, "engine_config": zero(zero_hpz_partition_size=2)},
        "tensor_parallel=2 with zero_hpz_partition_size=2 is not available",
    ),
    (
        {"tensor_parallel": 2, "engine_config": zero(offload_param={"device": "nvme", "nvme_path": "/tmp"})},
        "tensor_parallel=2 with offload_param to nvme is not available",
    ),
    (
        {"tensor_parallel": 2, "sequence_parallel": 2},
        "tensor_parallel=2 with sequence_parallel=2 asks for 4 ranks to a batch",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"compile": {"passes": ["autotp"]}}},
        "tensor_parallel=2 with the pass 'autotp'",
    ),
    (
        {"tensor_parallel": 2, "zero_stage": 2, "exchange": True},
        "exchange=True with tensor_parallel=2 is not available on DeepSpeed ZeRO-2",
    ),
]


@pytest.mark.parametrize(("options", "text"), CASES)
def test_a_plan_refuses(options: dict[str, Any], text: str, checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(zerostart.ZerostartError) as raised:
        zerostart.plan(checkpoints("qwen3_moe"), world_size=2, **options)
    assert text in str(raised.value)


def test_loads_and_engines_refuse_on_every_rank(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    run_ranks(refused, SHARING, checkpoints("qwen3_moe"), checkpoint("qwen3", tmp_path))


def refused(mixture: Path, path: Path) -> None:
    import deepspeed

    for options, text in CASES:
        with pytest.raises(zerostart.ZerostartError) as raised:
            zerostart.load(mixture, progress=False, **options)
        assert text in str(raised.value)
    case = Case(path, 2)
    model, config = loaded(case), config_of(case)
    for section, text in (
        ({"autotp_size": 1}, "loaded with tensor_parallel=2"),
        ({"autotp_size": 2, "preset_model": "qwen2"}, "another preset_model"),
    ):
        with pytest.raises(EngineError, match=text):
            deepspeed.initialize(model=model, config={**config, "tensor_parallel": section})
