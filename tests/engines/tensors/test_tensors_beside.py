"""What DeepSpeed itself makes of tensors beside sequences: why loads refuse both.

Where this fails because DeepSpeed has learnt it, the refusal in ``parallel_plans.py`` is to go.
"""

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

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


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": TENSORS,
        **more,
    }


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
