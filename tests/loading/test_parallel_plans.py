"""Plans with expert and tensor parallelism: coverage of elements, bytes read, refusals."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import zerostart
from tests.parity import checkpoint
from tests.tiny import TinyCheckpoints
from zerostart.engines import resolve_engine
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh


def build_meta_model(kind: str, **options: object) -> nn.Module:
    widths = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8}
    attention = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}
    config = AutoConfig.for_model(kind, **{**widths, **attention, **options})
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize(
    ("world", "expert", "tensor"), [(4, 2, 1), (4, 4, 1), (8, 2, 1), (6, 3, 1), (4, 1, 2)]
)
def test_ranks_hold_each_element_as_often_as_the_mesh_replicates_it(
    kind: str, engine: str, world: int, expert: int, tensor: int
) -> None:
    if tensor > 1 and engine == "deepspeed":
        pytest.skip("deepspeed shards no tensors in this version")
    if tensor > 1 and kind == "gpt_oss":
        pytest.skip("gpt_oss: its tensor-parallel plan is tested by itself")
    experts = {"num_local_experts": 8} if kind in ("mixtral", "gpt_oss") else {}
    if kind == "qwen3_moe":
        experts = {"num_experts": 8}
    if kind == "deepseek_v3":
        experts = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        experts |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1}
    model = build_meta_model(kind, **experts)
    resolved = resolve_engine(engine, 3, None, Mesh(world, expert, tensor))
    parallelism = resolved.parallelism(model)
    placements = resolved.placements(model, parallelism)
    for name, parameter in model.named_parameters():
        counts = torch.zeros(parameter.numel(), dtype=torch.int64)
        for rank in range(world):
            for first, count, _ in placements.layout(name, rank).runs():
                counts[first : first + count] += 1
        repeats = 1 if parallelism.cut(name) is not None else tensor
        assert torch.equal(counts, torch.full_like(counts, repeats)), name
        if ".experts." in name and expert > 1:
            assert parallelism.is_expert(name)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_rank_reads_only_its_own_experts(checkpoints: TinyCheckpoints, engine: str) -> None:
    path = checkpoints("qwen3_moe", torch.float32)
    whole = zerostart.plan(path, world_size=1, engine=engine)
    sharded = zerostart.plan(path, world_size=3, engine=engine, expert_parallel=3)
    # 5 experts on 3 ranks: the last has one. An expert is read by the one rank that owns it.
    assert sum(r.read_bytes for r in sharded.ranks) == pytest.approx(whole.ranks[0].read_bytes, rel=0.01)
    assert sharded.ranks[0].device_bytes == sharded.ranks[1].device_bytes > sharded.ranks[2].device_bytes


@pytest.mark.parametrize(
    ("kind", "options"),
    [("mixtral", {"expert_parallel": 2}), ("qwen3", {"tensor_parallel": 2, "engine": "fsdp2"})],
)
def test_plan_of_one_rank_is_its_part_of_the_full_plan(
    kind: str, options: dict[str, object], tmp_path: Path
) -> None:
    path = checkpoint(kind, tmp_path)
    full = zerostart.plan(path, world_size=4, **options)  # type: ignore[arg-type]
    for rank in range(4):
        single = zerostart.plan(path, world_size=4, rank=rank, **options)  # type: ignore[arg-type]
        assert single.ranks == (full.ranks[rank],)


def test_experts_without_a_plan_are_refused(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    with torch.device("meta"):
        model = Experts()
    with pytest.raises(ConfigError, match="declares no expert-parallel plan"):
        resolve_engine("fsdp2", 3, None, Mesh(4, 2)).parallelism(model)
