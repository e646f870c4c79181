"""Checkpointing a model's blocks does not change its training on any engine."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zerostart
from tests.engines.activation.test_gradient_checkpoint import differing_places
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.scale = nn.Parameter(torch.empty(6))
        self.outer = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor, *, time: torch.Tensor, mask: Any = None) -> tuple[torch.Tensor, int]:
        return x + F.dropout(self.outer(self.inner(x).tanh()), 0.2) * self.scale * time, 1


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = self.time(x[:, :1])
        for block in self.blocks:
            x, _ = block(x, time=time, mask=None)
        return x.square().mean()


def stack_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(t.shape, generator=generator) / 3 for n, t in Stack().state_dict().items()}


def train(engine: str, stage: int, mode: str) -> list[Any]:
    """Return the losses of three steps, and the parameters after them."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine_config = config if engine == "deepspeed" else None
    model = zerostart.load(
        stack_weights(), Stack, engine=engine, zero_stage=stage, engine_config=engine_config, progress=False
    )
    if mode != "off":
        assert zerostart.checkpoint_blocks(model, offload=mode == "offload") == (
            "blocks.0",
            "blocks.1",
            "blocks.2",
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if engine == "deepspeed":
        import deepspeed

        wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(20 + dist.get_rank())
    losses = []
    for _ in range(3):
        batch = torch.randn(2, 6)
        if engine == "deepspeed":
            loss = wrapped(batch)
            wrapped.backward(loss)
            wrapped.step()
        else:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *(tensor for _, tensor in zerostart.full_tensors(model, rank=None))]


ROUTES = (("deepspeed", 3), ("deepspeed", 2), ("fsdp2", 3))


def compare_modes(routes: tuple[tuple[str, int], ...], modes: tuple[str, ...]) -> list[str]:
    """List the engines and modes whose numbers differ from training without checkpointing."""
    lines, plain_runs = [], {}
    for engine, stage in routes:
        plain_runs[engine, stage] = train(engine, stage, "off")
        assert len(set(plain_runs[engine, stage][:3])) == 3
        for mode in modes:
            if differing_places(plain_runs[engine, stage], train(engine, stage, mode)):
                lines.append(f"{engine} {stage} {mode}")
    return lines


@pytest.mark.slow
def test_training_is_the_same_with_checkpointed_blocks() -> None:
    assert run_ranks(compare_modes, 2, ROUTES, ("plain", "offload")) == [[], []]


def test_blocks_are_found_by_class_and_by_name() -> None:
    model = Stack()
    assert zerostart.checkpoint_blocks(model, every=2) == ("blocks.0", "blocks.2")
    assert zerostart.checkpoint_blocks(model, blocks=[Block]) == ("blocks.0", "blocks.1", "blocks.2")
    assert zerostart.checkpoint_blocks(model, blocks=["blocks.*.inner"]) == tuple(
        f"blocks.{n}.inner" for n in range(3)
    )
    assert list(model.state_dict()) == list(Stack().state_dict())
    with pytest.raises(zerostart.errors.ConfigError, match="blocks names 'Blok'"):
        zerostart.checkpoint_blocks(model, blocks=["Blok"])
    with pytest.raises(zerostart.errors.ConfigError, match="must be a list of classes or names"):
        zerostart.checkpoint_blocks(model, blocks=[3])  # type: ignore[list-item]
    with pytest.raises(zerostart.errors.ConfigError, match="does not say which modules are its blocks"):
        zerostart.checkpoint_blocks(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(zerostart.errors.ConfigError, match="every=0"):
        zerostart.checkpoint_blocks(model, every=0)


def test_a_checkpointed_language_model_fills_no_cache() -> None:
    """A layer's second run would add to the cache again."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    model = transformers.Qwen3ForCausalLM(config)
    tokens = torch.arange(10).view(2, 5)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            assert len(zerostart.checkpoint_blocks(model)) == 2
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert differing_places(*results) == []
    past = model(input_ids=tokens, use_cache=True).past_key_values
    assert past.get_seq_length() == 0
