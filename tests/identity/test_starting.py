"""``load(None, model=...)``: modules that have values, and models that start without a checkpoint.

What is expected is the module itself, or what the same constructor gives unsharded after the same
``torch.manual_seed``.
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
MORE = [("deepspeed", 1), ("deepspeed", 0), ("fsdp2", 2), ("fsdp2", 0)]
SEED = 11


class Odd(nn.Module):
    """Draws that overlap, alternate between parameters, are thrown away, or are no weights."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(6, 5)
        self.above, self.below = nn.Parameter(both[:3].clone()), nn.Parameter(both[3:].clone())
        self.left, self.right = nn.Parameter(torch.empty(4, 7)), nn.Parameter(torch.empty(4, 7))
        for row in range(4):
            nn.init.normal_(self.left.data[row])
            nn.init.uniform_(self.right.data[row])
        self.linear = nn.Linear(40, 33)
        nn.init.normal_(self.linear.weight[:, :3])  # elements that lie apart
        nn.init.trunc_normal_(self.linear.bias)
        self.register_buffer("noise", torch.randn(5))
        self.register_buffer("own", torch.rand(5), persistent=False)
        self.square = nn.Linear(3, 3)
        nn.init.orthogonal_(self.square.weight)
        self.recurrent = nn.LSTM(3, 4)
        self.tied, self.table = nn.Linear(20, 100, bias=False), nn.Embedding(100, 20, padding_idx=3)
        self.tied.weight = self.table.weight
        self.square.bias.requires_grad_(False)
        self.plain, self.word = torch.arange(4), "kept"


def made(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    """What builds a tiny model of transformers, initialised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, sizes = TINY[kind]
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**sizes, **changes}))


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """The unsharded model, and the generator after it."""
    torch.manual_seed(SEED)
    return make(), torch.get_rng_state()


def wrong(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of what a sharded model has otherwise, buffers and attributes included."""
    want, got = expected.state_dict(), dict(zerostart.full_tensors(model, rank=None))
    found = list(want.keys() ^ got.keys())
    found += [n for n in want.keys() & got.keys() if not same(want[n], got[n])]
    buffers = dict(model.named_buffers())
    found += [n for n, buffer in expected.named_buffers() if not same(buffer, buffers[n].cpu())]
    trained = {n: p.requires_grad for n, p in expected.named_parameters(remove_duplicate=False)}
    mine = {n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)}
    if trained != mine or model.training != expected.training:
        found.append("flags")
    if isinstance(expected, Odd) and not (torch.equal(expected.plain, model.plain) and model.word == "kept"):
        found.append("attributes")
    return found


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def start_both_ways(cases: list[tuple[str, int, str, Mapping[str, Any]]]) -> None:
    for engine, stage, kind, options in cases:
        make = Odd if kind == "odd" else made(kind)
        expected, end = seeded(make)
        given = {"engine": engine, "zero_stage": stage, "progress": False, **options}
        # Ranks that were seeded otherwise get rank 0's.
        torch.manual_seed(SEED + 5 * dist.get_rank())
        fresh = zerostart.load(None, model=make, **given)
        assert wrong(fresh, expected) == [], (engine, stage, kind)
        assert dist.get_rank() or torch.equal(torch.get_rng_state(), end)
        report = zerostart.report(fresh)
        assert report.read_bytes == 0
        assert set(report.initialised) == set(expected.state_dict())
        module = copy.deepcopy(expected).eval()
        old = [p.data_ptr() for p in module.parameters()]
        existing = zerostart.load(None, model=module, **given)
        assert existing is module
        assert wrong(existing.train(), expected) == [], (engine, stage, kind)
        now = {p.data_ptr() for p in existing.parameters()}
        assert not now & set(old) - {0}
        assert zerostart.report(existing).initialised == ()


def test_what_exists_and_what_starts_is_as_unsharded() -> None:
    kinds = itertools.cycle(["odd", "qwen3"])
    cases = [(*pair, next(kinds), {}) for pair in ENGINES]
    experts = {"expert_parallel": 2}
    run_ranks(start_both_ways, 2, [*cases, ("fsdp2", 3, "qwen3_moe", experts)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_exists_and_what_starts_on_every_engine(ranks: int) -> None:
    kinds = ["odd", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"]
    run_ranks(
        start_both_ways,
        ranks,
        [(*pair, kind, {}) for pair in [*ENGINES, *MORE] for kind in kinds],
        timeout=400,
    )


@pytest.mark.slow
def test_what_starts_with_experts_and_tensors_over_ranks() -> None:
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
    """Errors on this rank; what was given has its values afterwards."""
    rank = dist.get_rank()
    messages = []
    whole, _ = seeded(Odd)
    values = {name: p.detach().clone() for name, p in whole.named_parameters()}
    options = {"engine": "deepspeed", "progress": False}

    def refused(model: Any, **more: Any) -> None:
        with pytest.raises(zerostart.ZerostartError) as caught:
            zerostart.load(None, model=model, **{**options, **more})
        messages.append(str(caught.value))

    refused(None)
    refused(whole, converter=lambda state: state)
    refused(whole if rank else nn.Linear(3, 4))
    refused(whole if rank else (lambda: Odd()))
    half = copy.deepcopy(whole)
    half.linear.weight = nn.Parameter(half.linear.weight.to("meta"))
    refused(half)
    refused(whole, engine_config={"zero_optimization": {"stage": 3, "no_such_key": 1}})
    refused(whole, engine="fsdp2", dtype=torch.bfloat16 if rank else torch.float32)
    shared = copy.deepcopy(whole)
    shared.left = nn.Parameter(shared.right.data)
    refused(shared)
    refused(lambda: nn.Linear(3, 3).register_buffer("x", torch.rand(2, device="cpu")) or nn.Linear(3, 3))
    refused(lambda: 7)
    refused(7)
    loaded = zerostart.load(None, model=copy.deepcopy(whole), **options)
    refused(loaded)
    assert all(torch.equal(p, values[name]) for name, p in whole.named_parameters())
    return messages


def test_what_is_refused() -> None:
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


def train(engine: str, stage: int) -> None:
    """A model that started here trains as the unsharded one that was given whole, and is saved as it."""
    import tempfile

    from safetensors.torch import load_file

    fresh = zerostart.load(None, model=made("qwen3_moe"), engine=engine, zero_stage=stage, progress=False)
    folder = tempfile.mkdtemp()
    zerostart.save(fresh, folder)
    found = load_file(f"{folder}/model.safetensors")
    whole = dict(zerostart.full_tensors(fresh, rank=None))
    again = zerostart.load(folder, engine=engine, zero_stage=stage, progress=False)
    assert any("experts.0.up_proj" in name for name in found)  # in the layout of the hub
    assert all(same(tensor, whole[name]) for name, tensor in zerostart.full_tensors(again, rank=None))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_what_starts_is_saved_in_the_layout_of_its_checkpoints(engine: str, stage: int) -> None:
    run_ranks(train, 1, engine, stage)
