"""Checkpoints of a small model in the own formats of DeepSpeed and torch."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "intermediate_size": 37,
    "vocab_size": 61,
}


def model_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("qwen3", tie_word_embeddings=True, **SIZES)


def build_model() -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config())
    model.register_buffer("steps_seen", torch.arange(3.0))
    return model


def write_deepspeed(out: str, stage: int, bf16: bool, frozen: bool) -> None:
    """Train two steps with two parameter groups and save."""
    import deepspeed

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "sub_group_size": 5000},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings) if stage == 3 else contextlib.nullcontext():
        model = build_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "mlp" in name))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if "norm" not in n]},
        {"params": [p for n, p in trained if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(2):
        ids = torch.arange(7).view(1, 7) + step + dist.get_rank()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(out)
    if dist.get_rank() == 0:
        model_config().save_pretrained(out)


def write_dcp(out: str, wrapped: bool) -> dict[str, torch.Tensor] | None:
    """Train one step with FSDP2, save, and return the full state on rank 0."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(7).view(1, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states} if wrapped else weights, checkpoint_id=out)
    full_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.config.architectures = ["Qwen3ForCausalLM"]
        model.config.save_pretrained(out)
        return full_state
    return None
