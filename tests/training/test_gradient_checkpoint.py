"""Gradient checkpointing gives the numbers of the plain call, whatever goes in and comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torch_checkpoint

import zerostart
from ranks import run_ranks
from zerostart.errors import ConfigError

Run = Callable[..., Any]


def plain(function: Run, *args: Any, offload: bool = False, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def block(x: torch.Tensor, *, scale: torch.Tensor, extra: Any = None, shift: float = 1.0) -> Any:
    """Draws, has several outputs of several kinds, and takes tensors from wherever they stand."""
    y = F.dropout(x * scale, 0.5) + shift
    if extra is not None:
        y = y * extra["pair"][0].sin() + extra["pair"][1] * extra["none_of_it"]["deep"]
    return y, {"half": y.detach() / 2, "count": 3, "none": None}


def mixed(checkpoint: Run, offload: bool) -> list[Any]:
    torch.manual_seed(11)
    x, scale, inner = (torch.randn(5, 7).requires_grad_() for _ in range(3))
    frozen = torch.randn(7)
    extra = {"pair": (inner * 2, frozen), "none_of_it": {"deep": torch.randn(5, 1)}}
    y, others = checkpoint(block, x.exp(), scale=scale, extra=extra, shift=0.5, offload=offload)
    z, _ = checkpoint(block, y, scale=frozen, offload=offload)  # here keywords without a gradient
    (z.sum() + others["half"].sum()).backward()
    return [z, others["half"], others["count"], others["none"], x.grad, scale.grad, inner.grad, torch.rand(3)]


def frozen_inputs(checkpoint: Run, offload: bool) -> list[Any]:
    """Parameters inside get their gradients where no input needs one."""
    torch.manual_seed(12)
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2)), torch.randn(3, 4)
    y = checkpoint(layer, x, offload=offload)
    y.square().sum().backward()
    return [y, *(p.grad for p in layer.parameters())]


def nested(checkpoint: Run, offload: bool) -> list[Any]:
    torch.manual_seed(13)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(layer(x).tanh(), 0.4)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, checkpoint(inner, x, offload=offload).sin(), offload=offload) * x

    y = checkpoint(outer, x, offload=offload)
    y = y.add_(1)  # what comes out may be written to
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def feature_caches(checkpoint: Run, offload: bool) -> list[Any]:
    """The trap of causal video VAEs: a list that each layer reads, fills, and counts on in another list."""
    torch.manual_seed(14)
    weight = torch.randn(4, 4, requires_grad=True)
    cache: list[Any] = [None, None]
    made = []

    def layer(x: torch.Tensor, cache: list[Any], index: list[int], notes: dict[str, Any]) -> torch.Tensor:
        place = index[0]
        before = 0 if cache[place] is None else cache[place]
        cache[place] = x * 2
        notes.setdefault("places", []).append(place)
        index[0] += 1
        return (x + before) @ weight

    for x in torch.randn(3, 2, 4):  # three frames in turn
        index, notes = [0], {}
        x = checkpoint(layer, x, cache, index, notes, offload=offload)
        x = checkpoint(layer, x, cache=cache, index=index, notes=notes, offload=offload)
        made += [x, index[0], notes["places"]]
    sum(x.square().sum() for x in made[::3]).backward()
    return [*made, *cache, weight.grad]


def last_features(checkpoint: Run, offload: bool) -> list[Any]:
    """A cache that forgets: a deque."""
    torch.manual_seed(15)
    weight, made = torch.randn(4, 4, requires_grad=True), []
    cache: deque[torch.Tensor] = deque(maxlen=2)

    def layer(x: torch.Tensor, cache: deque[torch.Tensor]) -> torch.Tensor:
        cache.append(x @ weight)
        return sum(cache, start=x) * len(cache)

    for x in torch.randn(3, 2, 4):
        made.append(checkpoint(layer, x, cache, offload=offload))
    torch.stack(made).square().sum().backward()
    return [*made, *cache, weight.grad]


CASES = [mixed, frozen_inputs, nested, feature_caches, last_features]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_and_gradients_are_those_of_the_plain_call(case: Run, offload: bool) -> None:
    assert unlike(case(plain, False), case(zerostart.gradient_checkpoint, offload)) == []


def unlike(expected: list[Any], found: list[Any]) -> list[int]:
    """Places that differ, by bits for tensors."""
    assert len(expected) == len(found)
    return [n for n, pair in enumerate(zip(expected, found, strict=True)) if not _same(*pair)]


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_nothing_is_kept_but_the_inputs() -> None:
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        zerostart.gradient_checkpoint(lambda x: x.exp().sin().exp().repeat(100).exp(), x)
    assert sum(kept) == 10


@pytest.mark.parametrize("offload", [False, True])
def test_what_a_function_writes_to_in_place_is_no_value_for_its_second_run(offload: bool) -> None:
    """torch says so of what it saves itself; where it is kept for it, nobody else does."""

    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin() * factor

    def gained(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor.add_(1)

    for function in (scaled, gained, torch.mul):
        x, factor = torch.randn(3, requires_grad=True).exp(), torch.randn(3)
        y = zerostart.gradient_checkpoint(function, x, factor, offload=offload)
        if function is torch.mul:
            factor.add_(1)  # afterwards, by whoever called it
        with pytest.raises(zerostart.errors.ConfigError if offload else RuntimeError, match=r"in.?place"):
            y.sum().backward()


def test_each_backward_of_a_retained_graph_begins_with_the_second_run() -> None:
    """An engine's hooks gather parameters for a forward, and must not do so inside a backward of them."""
    order: list[str] = []

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            order.append("forward")
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            order.append("backward")
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    apply: Any = Last.apply
    x = torch.randn(3, requires_grad=True)
    y, z = zerostart.gradient_checkpoint(lambda x: (apply(x.exp()), x.tan()), x)
    for result in (y, z, y, y + z):
        order.clear()
        x.grad = None
        result.sum().backward(retain_graph=True)
        assert order == (["forward"] if result is z else ["forward", "backward"])
        expected = x.exp() * x.exp().cos() * (result is not z) + (1 + x.tan() ** 2) * (result is not y)
        assert torch.allclose(x.grad, expected)  # type: ignore[arg-type]


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
        for one in self.blocks:
            x, _ = one(x, time=time, mask=None)
        return x.square().mean()


def stack_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(t.shape, generator=generator) / 3 for n, t in Stack().state_dict().items()}


def train(engine: str, stage: int, mode: str) -> list[Any]:
    """Losses of three steps, and the parameters after them."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    chosen = config if engine == "deepspeed" else None
    model = zerostart.load(
        stack_weights(), Stack, engine=engine, zero_stage=stage, engine_config=chosen, progress=False
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
    """One line for each engine and way of checkpointing whose numbers are not those without it."""
    found, plain_runs = [], {}
    for engine, stage in routes:
        plain_runs[engine, stage] = train(engine, stage, "off")
        assert len(set(plain_runs[engine, stage][:3])) == 3
        for mode in modes:
            if unlike(plain_runs[engine, stage], train(engine, stage, mode)):
                found.append(f"{engine} {stage} {mode}")
    import deepspeed

    deepspeed.init_distributed("gloo")
    deepspeed.checkpointing.configure(None)
    for engine, stage in routes:
        if unlike(plain_runs[engine, stage], train(engine, stage, "DeepSpeed's own")):
            found.append(f"{engine} {stage} by DeepSpeed")
    for case in (mixed, frozen_inputs, nested):
        if unlike(case(plain, False), case(zerostart.gradient_checkpoint, False)):
            found.append(f"{case.__name__} by DeepSpeed")
    with pytest.raises(zerostart.errors.ConfigError, match="changed a list"):
        feature_caches(zerostart.gradient_checkpoint, False)
    return found


@pytest.mark.parametrize(
    ("routes", "modes"),
    [
        (ROUTES[:1], ("plain",)),
        pytest.param(ROUTES, ("plain", "offload"), marks=pytest.mark.slow),
    ],
    ids=["ZeRO-3", "all"],
)
def test_training_is_the_same_with_checkpointed_blocks(routes: Any, modes: Any) -> None:
    assert run_ranks(compare_modes, 2, routes, modes) == [[], []]


class Holding(nn.Module):
    """Holds a parameter itself, beside its layers, which it has torch checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token
        for layer in self.layers:
            x = torch_checkpoint.checkpoint(layer, x, use_reentrant=False).tanh()
        return x.square().mean()


def compare_holding() -> list[str]:
    """The names of parameters that differ after three steps on FSDP2 from those of the unsharded model."""
    generator = torch.Generator().manual_seed(2)
    weights = {n: torch.randn(t.shape, generator=generator) / 3 for n, t in Holding().state_dict().items()}
    alone = Holding()
    alone.load_state_dict(weights)
    shared = zerostart.load(weights, Holding, engine="fsdp2", progress=False)
    for model in (alone, shared):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):  # the same on all ranks, whose mean it is
            model(torch.randn(2, 6, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = dict(zerostart.full_tensors(shared, rank=None))
    return [n for n, p in alone.named_parameters() if not torch.allclose(p, trained[n], atol=1e-6)]


def test_a_model_with_parameters_of_its_own_may_checkpoint_its_layers_on_fsdp2() -> None:
    """The layers run a second time when the model's forward is over, and are called by it all the same."""
    assert run_ranks(compare_holding, 2) == [[], []]


def test_a_container_that_cannot_be_made_anew_is_not_to_be_changed() -> None:
    class Features(list[torch.Tensor]):
        pass

    def layer(x: torch.Tensor, features: Features) -> torch.Tensor:
        return x * len(features)

    def filling(x: torch.Tensor, features: Features) -> torch.Tensor:
        features.append(x)
        return layer(x, features)

    x = torch.ones(2, requires_grad=True)
    zerostart.gradient_checkpoint(layer, x, Features([x])).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"changed a Features that it was given.*pass a list"):
        zerostart.gradient_checkpoint(filling, x, Features())


def test_blocks_are_found_by_class_and_by_name() -> None:
    model = Stack()
    assert zerostart.checkpoint_blocks(model, every=2) == ("blocks.0", "blocks.2")
    assert zerostart.checkpoint_blocks(model, blocks=[Block]) == ("blocks.0", "blocks.1", "blocks.2")
    assert zerostart.checkpoint_blocks(model, blocks=["blocks.*.inner"]) == tuple(
        f"blocks.{n}.inner" for n in range(3)
    )
    assert list(model.state_dict()) == list(Stack().state_dict())
    with pytest.raises(zerostart.errors.ConfigError, match="blocks has 'Blok'"):
        zerostart.checkpoint_blocks(model, blocks=["Blok"])
    with pytest.raises(zerostart.errors.ConfigError, match="must be a list of classes or names"):
        zerostart.checkpoint_blocks(model, blocks=[3])  # type: ignore[list-item]
    with pytest.raises(zerostart.errors.ConfigError, match="name them"):
        zerostart.checkpoint_blocks(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(zerostart.errors.ConfigError, match="every=0"):
        zerostart.checkpoint_blocks(model, every=0)


def test_a_language_model_fills_no_cache() -> None:
    """transformers makes one unless it is told not to; a layer's second run would add to it again."""
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
    made = []
    for checkpointing in (False, True):
        if checkpointing:
            assert len(zerostart.checkpoint_blocks(model)) == 2
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        made.append([loss, *(p.grad for p in model.parameters())])
    assert unlike(*made) == []
    past = model(input_ids=tokens, use_cache=True).past_key_values
    assert past.get_seq_length() == 0


def test_a_model_whose_cache_counts_no_tokens_fills_none() -> None:
    """Out of training mode, in which a load leaves it, it makes a cache of states alone."""
    import transformers

    config = transformers.MambaConfig(
        vocab_size=11, hidden_size=8, state_size=4, num_hidden_layers=2, time_step_rank=2
    )
    model = transformers.MambaForCausalLM(config).eval()
    tokens = torch.arange(10).view(2, 5)
    made = []
    for settings in ({"use_cache": False}, {}):
        if not settings:
            assert len(zerostart.checkpoint_blocks(model)) == 2
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, **settings).loss
        loss.backward()
        made.append([loss, *(p.grad for p in model.parameters())])
    assert unlike(*made) == []
    with torch.no_grad():
        past = model(input_ids=tokens).cache_params
    with pytest.raises(zerostart.errors.ConfigError, match="a cache with tokens in it"):
        model(input_ids=tokens[:, :1], cache_params=past)
