"""``load(None, model=...)``: existing modules and fresh models.

The expectation is the module itself, or an unsharded one after the same ``torch.manual_seed``.
"""

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TINY

ENGINES = [("deepspeed", 3), ("deepspeed", 2), ("fsdp2", 3)]
SLOW_ENGINES = [("deepspeed", 1), ("deepspeed", 0), ("fsdp2", 2), ("fsdp2", 0)]
SEED = 11


class Unusual(nn.Module):
    """Random numbers overlap, alternate between parameters, or are discarded."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(6, 5)
        self.above, self.below = nn.Parameter(both[:3].clone()), nn.Parameter(both[3:].clone())
        self.left, self.right = nn.Parameter(torch.empty(4, 7)), nn.Parameter(torch.empty(4, 7))
        for row in range(4):
            nn.init.normal_(self.left.data[row])
            nn.init.uniform_(self.right.data[row])
        self.linear = nn.Linear(40, 33)
        nn.init.normal_(self.linear.weight[:, :3])  # elements that are not adjacent
        nn.init.trunc_normal_(self.linear.bias)
        self.register_buffer("noise", torch.randn(5))
        self.register_buffer("own", torch.rand(5), persistent=False)
        self.square = nn.Linear(3, 3)
        nn.init.orthogonal_(self.square.weight)
        self.recurrent = nn.LSTM(3, 4)
        self.tied, self.table = nn.Linear(20, 100, bias=False), nn.Embedding(100, 20, padding_idx=3)
        self.tied.weight = self.table.weight
        self.square.bias.requires_grad_(False)
        self.plain, self.word = torch.arange(4), "text"


def factory(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a tiny transformers model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, sizes = TINY[kind]
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**sizes, **changes}))


def build_seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """Return the unsharded model and the generator's state."""
    torch.manual_seed(SEED)
    return make(), torch.get_rng_state()


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return names of different tensors, buffers, flags and attributes."""
    want, got = expected.state_dict(), dict(zerostart.full_tensors(model, rank=None))
    names = list(want.keys() ^ got.keys())
    names += [n for n in want.keys() & got.keys() if not equal(want[n], got[n])]
    buffers = dict(model.named_buffers())
    names += [n for n, buffer in expected.named_buffers() if not equal(buffer, buffers[n].cpu())]
    expected_flags = {n: p.requires_grad for n, p in expected.named_parameters(remove_duplicate=False)}
    flags = {n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)}
    if expected_flags != flags or model.training != expected.training:
        names.append("flags")
    if isinstance(expected, Unusual) and not torch.equal(expected.plain, model.plain):
        names.append("plain")
    if isinstance(expected, Unusual) and model.word != "text":
        names.append("attributes")
    return names


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def start_both_ways(cases: list[tuple[str, int, str, Mapping[str, Any]]]) -> None:
    for engine, stage, kind, options in cases:
        make = Unusual if kind == "odd" else factory(kind)
        expected, end = build_seeded(make)
        arguments = {"engine": engine, "zero_stage": stage, "progress": False, **options}
        # Ranks with other seeds get rank 0's values.
        torch.manual_seed(SEED + 5 * dist.get_rank())
        fresh = zerostart.load(None, model=make, **arguments)
        assert differences(fresh, expected) == [], (engine, stage, kind)
        assert dist.get_rank() or torch.equal(torch.get_rng_state(), end)
        report = zerostart.report(fresh)
        assert report.read_bytes == 0
        assert set(report.initialised) == set(expected.state_dict())
        module = copy.deepcopy(expected).eval()
        old_addresses = [p.data_ptr() for p in module.parameters()]
        existing = zerostart.load(None, model=module, **arguments)
        assert existing is module
        assert differences(existing.train(), expected) == [], (engine, stage, kind)
        new_addresses = {p.data_ptr() for p in existing.parameters()}
        assert not new_addresses & set(old_addresses) - {0}
        assert zerostart.report(existing).initialised == ()


def test_existing_and_fresh_models_equal_unsharded_ones() -> None:
    kinds = itertools.cycle(["odd", "qwen3"])
    cases = [(*pair, next(kinds), {}) for pair in ENGINES]
    experts = {"expert_parallel": 2}
    run_ranks(start_both_ways, 2, [*cases, ("fsdp2", 3, "qwen3_moe", experts)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_existing_and_fresh_models_on_every_engine(ranks: int) -> None:
    kinds = ["odd", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"]
    run_ranks(
        start_both_ways,
        ranks,
        [(*pair, kind, {}) for pair in [*ENGINES, *SLOW_ENGINES] for kind in kinds],
        timeout=400,
    )


@pytest.mark.slow
def test_fresh_models_with_parallel_experts_and_tensors() -> None:
    cases = [
        ("deepspeed", 3, "qwen3_moe", {"expert_parallel": 2}),
        ("deepspeed", 2, "qwen3_moe", {"expert_parallel": 2}),
        ("deepspeed", 2, "qwen3_even", {"tensor_parallel": 2}),
        ("deepspeed", 3, "qwen3_even", {"tensor_parallel": 2}),
        ("fsdp2", 3, "qwen3_moe", {"expert_parallel": 2}),
        ("fsdp2", 3, "qwen3_even", {"tensor_parallel": 2}),
    ]
    run_ranks(start_both_ways, 4, cases, timeout=200)


def refuse() -> list[str]:
    """Return errors; the given module keeps its values."""
    rank = dist.get_rank()
    messages = []
    whole, _ = build_seeded(Unusual)
    values = {name: p.detach().clone() for name, p in whole.named_parameters()}
    options = {"engine": "deepspeed", "progress": False}

    def expect_error(model: Any, **overrides: Any) -> None:
        with pytest.raises(zerostart.ZerostartError) as caught:
            zerostart.load(None, model=model, **{**options, **overrides})
        messages.append(str(caught.value))

    expect_error(None)
    expect_error(whole, converter=lambda state: state)
    expect_error(whole if rank else nn.Linear(3, 4))
    expect_error(whole if rank else (lambda: Unusual()))
    half = copy.deepcopy(whole)
    half.linear.weight = nn.Parameter(half.linear.weight.to("meta"))
    expect_error(half)
    expect_error(whole, engine_config={"zero_optimization": {"stage": 3, "no_such_key": 1}})
    expect_error(whole, engine="fsdp2", dtype=torch.bfloat16 if rank else torch.float32)
    shared = copy.deepcopy(whole)
    shared.left = nn.Parameter(shared.right.data)
    expect_error(shared)
    expect_error(lambda: nn.Linear(3, 3).register_buffer("x", torch.rand(2, device="cpu")) or nn.Linear(3, 3))
    expect_error(lambda: 7)
    expect_error(7)
    loaded = zerostart.load(None, model=copy.deepcopy(whole), **options)
    expect_error(loaded)
    assert all(torch.equal(p, values[name]) for name, p in whole.named_parameters())
    return messages


def test_refusals() -> None:
    by_rank = run_ranks(refuse, 2)
    assert by_rank[0] == by_rank[1]
    expected = [
        "source is None on every rank",
        "converter transforms the tensors of a checkpoint",
        "the modules of ranks 0 and 1 differ in their tensors",
        "the modules of ranks 0 and 1 differ in their tensors",
        "linear.weight is on the meta device",
        "no_such_key",
        "the ranks do not do the same",
        "share memory without being the same tensor",
        "draws random numbers with device='cpu'",
        "returned a int",
        "model is a int",
        "is sharded already",
    ]
    assert len(by_rank[0]) == len(expected)
    for message, part in zip(by_rank[0], expected, strict=True):
        assert part in message


def save_and_reload(engine: str, stage: int) -> None:
    """Save a fresh model and load it again."""
    import tempfile

    from safetensors.torch import load_file

    fresh = zerostart.load(None, model=factory("qwen3_moe"), engine=engine, zero_stage=stage, progress=False)
    folder = tempfile.mkdtemp()
    zerostart.save(fresh, folder)
    saved = load_file(f"{folder}/model.safetensors")
    expected = dict(zerostart.full_tensors(fresh, rank=None))
    reloaded = zerostart.load(folder, engine=engine, zero_stage=stage, progress=False)
    assert any("experts.0.up_proj" in name for name in saved)  # the hub's layout
    assert all(equal(tensor, expected[name]) for name, tensor in zerostart.full_tensors(reloaded, rank=None))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_fresh_model_is_saved_in_the_hub_layout(engine: str, stage: int) -> None:
    run_ranks(save_and_reload, 1, engine, stage)
