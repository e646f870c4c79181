"""What DeepSpeed itself makes of tensors beside experts, and beside sequences: why loads refuse both.

Where one of these fails because DeepSpeed has learnt it, the refusal in ``engines/deepspeed/settings.py``
(``layout/mesh.py``) is to go.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
TENSORS = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        ],
    },
}
BATCHES = torch.randint(0, 64, (2, 2, 8), generator=torch.Generator().manual_seed(2))


def mixture() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    torch.manual_seed(0)
    model: nn.Module = MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, **experts))
    return model


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": TENSORS,
        **more,
    }


def repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' registry of recorded outputs as AutoEP of DeepSpeed calls it, with a default."""
    from transformers.utils import output_capturing

    registry: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    own = registry.get

    def get(self: Any, key: Any, *default: Any) -> Any:
        return dict.get(self, key, *default) if default else own(self, key)

    monkeypatch.setattr(registry, "get", get)


def norm_beside_experts(stage: int, repaired: bool) -> float:
    import deepspeed
    import torch.distributed as dist

    section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if repaired:
            repair(monkeypatch)
        engine, *_ = deepspeed.initialize(model=mixture(), config=zero(stage, expert_parallel=section))
    batch = BATCHES[dist.get_rank() // 2]
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    return float(engine.get_global_grad_norm())


def norm_of_one_process() -> float:
    model = mixture()
    for batch in BATCHES:
        (model(input_ids=batch, labels=batch).loss / 2).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_of_stages_1_and_2_leaves_experts_out(stage: int) -> None:
    norms = run_ranks(norm_beside_experts, 4, stage, True, timeout=200)
    one = pytest.approx(norm_of_one_process(), rel=1e-4)
    assert all((norm == one) == (stage == 3) for norm in norms)
    assert all(norm == norms[0] for norm in norms)


def refusal_of_experts() -> str:
    with pytest.raises(TypeError) as raised:
        norm_beside_experts(3, False)
    return str(raised.value)


def test_its_experts_do_not_start_with_this_transformers() -> None:
    from transformers.utils import output_capturing

    if type(getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})) is dict:
        pytest.skip("transformers keeps recorded outputs as AutoEP expects")
    for text in run_ranks(refusal_of_experts, 4, timeout=200):
        assert "_CanRecordRegistry.get() takes 2 positional arguments" in text


def refusal_of_sequences() -> str:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation="sdpa"))
    given = {"sequence_parallel_size": 2, "micro_batch_size": 2}
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", **given)
    engine, *_ = deepspeed.initialize(model=model, config=zero(2, sequence_parallel_size=2), mpu=mpu)
    batch = BATCHES[dist.get_rank() // 2].chunk(2, dim=1)[dist.get_rank() % 2]
    with pytest.raises(AssertionError) as raised:
        engine(input_ids=batch, labels=batch, position_ids=batch)
    return str(raised.value)


def test_ranks_that_share_tensors_have_one_part_of_a_sequence() -> None:
    for text in run_ranks(refusal_of_sequences, 4, timeout=200):
        assert text.startswith("Data inconsistency within the TP group")
