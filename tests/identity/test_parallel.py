"""Expert and tensor parallelism work like one process."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.identity.parallel import Layout, Training, choose_parts, train
from tests.parity import (
    ROUNDING,
    batches,
    checkpoint,
    differences,
    optimizer,
    reference,
    train_in_one_process,
)
from tests.ranks import run_ranks
from zerostart.errors import EngineError

MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
FSDP2 = partial(Layout, "fsdp2")


@dataclass(frozen=True)
class Case:
    """One training; ``then`` is the layout after two steps."""

    kind: str
    world: int
    layout: Layout
    then: Layout | None = None
    parts: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    tolerance: float = field(default=0.0)

    def __str__(self) -> str:
        def short(layout: Layout) -> str:
            axes = f"{layout.engine}{layout.stage}-e{layout.experts}t{layout.tensors}a{layout.accumulation}"
            return f"{axes}-{layout.settings}" if layout.settings else axes

        then = [short(self.then)] if self.then else []
        return "-".join([self.kind, str(self.world), short(self.layout), *then, *filter(None, [self.parts])])


FAST = [
    Case("qwen3_moe", 4, Layout(experts=2)),
    Case("gpt_oss", 2, Layout(stage=2, experts=2, accumulation=2)),
    Case("deepseek_v3", 2, FSDP2(experts=2), then=Layout(stage=1, experts=2)),
    Case("mixtral", 4, FSDP2(experts=2, tensors=2)),
]


def experts() -> Iterator[Case]:
    for kind in MODELS:
        yield Case(kind, 2, Layout(experts=2, accumulation=2))
        yield Case(kind, 4, Layout(experts=4))
        yield Case(kind, 4, Layout(stage=2, experts=2))
        yield Case(kind, 2, Layout(stage=1, experts=2), then=FSDP2(experts=2))
        yield Case(kind, 4, FSDP2(experts=2))
        yield Case(kind, 4, FSDP2(experts=4, accumulation=1), then=Layout(experts=2))
    yield Case("qwen3_moe", 2, Layout())
    # Its expert plan also has tensor styles for the dense part.
    yield Case("gemma4_text", 2, Layout(stage=2, experts=2, accumulation=2))
    yield Case("gemma4_text", 4, FSDP2(experts=2))
    for parts in ("adapters", "dense", "experts"):
        yield Case("qwen3_moe", 4, Layout(stage=2, experts=2), parts=parts)
    for parts in ("adapters", "dense"):
        yield Case("qwen3_moe", 2, Layout(stage=3, experts=2), parts=parts)


def tensors() -> Iterator[Case]:
    biases = (("attention_bias", True), ("mlp_bias", True))
    for kind, options in (
        ("llama", biases),
        ("starcoder2", ()),
        ("gpt_neox", ()),
        ("phi", ()),
        ("gpt_oss", ()),
    ):
        yield Case(kind, 2, FSDP2(tensors=2), options=options)
    yield Case("qwen3", 4, FSDP2(tensors=2), then=FSDP2(tensors=2, settings="offload"))
    for kind in MODELS:
        yield Case(kind, 4, FSDP2(experts=4, tensors=2), then=FSDP2(experts=2, settings="dimensions"))
        for stage in (1, 2, 3):
            both = Layout(stage=stage, experts=2, tensors=2)
            yield Case(kind, 4, both, then=Layout(experts=4, tensors=2))
    yield Case("deepseek_v3", 4, Layout(stage=2, experts=2, tensors=4))


def placements() -> Iterator[Case]:
    for settings in ("parameters on the host", "all on the host", "some persistent", "all persistent"):
        yield Case("qwen3_moe", 4, Layout(experts=2, settings=settings))
    for kind, e, t in (("qwen3_moe", 2, 1), ("qwen3", 1, 2), ("qwen3_moe", 2, 2)):
        for settings in ("states on the host", "reduced whole", "scattered gradients", "overlapping"):
            yield Case(kind, 4, Layout(experts=e, tensors=t, settings=settings))
        for settings in ("states on the host", "in turn"):
            yield Case(kind, 4, Layout(stage=2, experts=e, tensors=t, settings=settings))
    for settings in ("offload", "replicas", "dimensions", "all"):
        yield Case("qwen3", 4, FSDP2(tensors=2, settings=settings))
        yield Case("gpt_oss", 4, FSDP2(experts=2, settings=settings))
        yield Case("mixtral", 4, FSDP2(experts=2, tensors=2, settings=settings))
    # With one owner, an expert's gradient is divided once like all others.
    yield Case("qwen3_moe", 4, FSDP2(experts=2, settings="half"), tolerance=1e-2)


@pytest.mark.parametrize(
    "case",
    [*FAST, *(pytest.param(c, marks=pytest.mark.slow) for c in (*experts(), *tensors(), *placements()))],
    ids=str,
)
def test_ranks_train_as_one_process(case: Case, folder: Path, tmp_path: Path) -> None:
    path = checkpoint(case.kind, folder, **dict(case.options))
    expected = (
        run_ranks(train_in_one_process, 1, path, partial(pretrained, parts=case.parts))[0]
        if case.parts
        else reference(path)
    )
    out = None if case.parts else tmp_path
    traces = run_ranks(train, case.world, path, case.layout, case.then, out, case.parts, timeout=240)
    for trace in traces:
        if case.parts:
            trace.weights, trace.gradients = expected.weights, expected.gradients
        if case.layout.settings == "in turn":  # DeepSpeed reads gradients from elsewhere here
            trace.gradients = expected.gradients
        assert differences(trace, expected, case.tolerance or ROUNDING.get(case.kind, 1e-5)) == []
    if out is not None:
        saved = pretrained(out / "saved").state_dict()
        assert saved.keys() == traces[0].weights.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in traces[0].weights.items())


def pretrained(path: Path, parts: str = "") -> nn.Module:
    """Load the whole model by plain transformers."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = choose_parts(AutoModelForCausalLM.from_pretrained(path), parts)
    return model


@pytest.mark.parametrize(
    ("kind", "count", "ranks", "engine", "stage"),
    [
        ("gpt_oss", 32, 4, "deepspeed", 3),
        pytest.param("mixtral", 5, 3, "deepspeed", 3, marks=pytest.mark.slow),
        pytest.param("mixtral", 5, 3, "deepspeed", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 6, 3, "deepspeed", 3, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 32, 4, "fsdp2", 3, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 6, 3, "fsdp2", 3, marks=pytest.mark.slow),
    ],
)
def test_each_rank_holds_its_own_experts(
    kind: str, count: int, ranks: int, engine: str, stage: int, folder: Path
) -> None:
    """Covers transformers' issue 45548 and uneven numbers."""
    name = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    path = checkpoint(kind, folder, **{name: count})
    stock = pretrained(path).state_dict()
    results = run_ranks(load_experts, ranks, path, engine, stage)
    experts_per_rank = -(-count // ranks)
    for rank, (local, gathered, _) in enumerate(results):
        assert gathered.keys() == stock.keys()
        assert all(torch.equal(gathered[n], stock[n]) for n in stock)
        assert len(local) >= 2
        for name, tensor in local.items():
            assert torch.equal(tensor, stock[name][rank * experts_per_rank : (rank + 1) * experts_per_rank])
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if stage == 3:
        assert sum(read_bytes for _, _, read_bytes in results) < stored
    options: dict[str, Any] = {"engine": engine, "zero_stage": stage, "expert_parallel": ranks}
    plan = zerostart.plan(path, world_size=ranks, **options)
    assert [rank.read_bytes for rank in plan.ranks] == [read_bytes for _, _, read_bytes in results]


def load_experts(
    path: Path, engine: str, stage: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return local experts, whole tensors, and bytes read."""
    options: dict[str, Any] = {"engine": engine, "zero_stage": stage, "progress": False}
    model = zerostart.load(path, expert_parallel=dist.get_world_size(), **options)
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    if engine == "fsdp2":
        local = {n: p.to_local().detach() for n, p in experts.items()}  # type: ignore[operator]
    else:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(experts.values())):
            local = {n: p.detach().clone() for n, p in experts.items()}
    whole = {n: t for n, t in zerostart.full_tensors(model, rank=None) if t is not None}
    return local, whole, zerostart.report(model).read_bytes


def test_plan_reads_only_this_ranks_part(tmp_path: Path) -> None:
    """Rows are longer than a tolerated gap."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "head_dim": 512, "num_hidden_layers": 1}
    path = checkpoint("mixtral", tmp_path, **sizes)
    experts = 8 * 3 * 8 * 1024 * 4
    tensors = (2 * 4 * 512 + 2 * 2 * 512 + 96) * 1024 * 4
    dense = (96 + 8 + 3) * 1024 * 4  # embedding, router and norms
    assert zerostart.plan(path, world_size=1).ranks[0].read_bytes == experts + tensors + dense
    options = {"expert_parallel": 4, "tensor_parallel": 2, "world_size": 4}
    for rank in zerostart.plan(path, zero_stage=2, **options).ranks:
        assert rank.read_bytes <= 1.01 * (experts / 4 + tensors / 2 + dense)
    for rank in zerostart.plan(path, zero_stage=3, **options).ranks:
        assert rank.read_bytes <= 1.01 * (experts + tensors + 2 * dense) / 4


def test_fsdp2_plans_to_read_only_its_slices(folder: Path) -> None:
    path = checkpoint("mixtral", folder, hidden_size=256, intermediate_size=512, head_dim=64)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    for settings, replicas in (("replicas", 2), ("dimensions", 1), ("offload", 1), ("all", 2)):
        layout = FSDP2(experts=2, tensors=2, settings=settings)
        plan = zerostart.plan(path, world_size=8, **layout.options())
        read = [rank.read_bytes for rank in plan.ranks]
        assert read[: 8 // replicas] * replicas == read
        assert abs(sum(read) / (stored * replicas) - 1) < 0.01
        # Buffers are not in the checkpoint.
        on_device = {rank.device_bytes for rank in plan.ranks}
        host = "offload_policy" in layout.config()
        assert max(on_device) < 1024 if host else min(on_device) >= max(read) / 1.01


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_checkpoint_keeps_experts_under_enable(stage: int, tmp_path: Path) -> None:
    assert run_ranks(save_as_deepspeed, 2, checkpoint("gpt_oss", tmp_path), tmp_path / "out", stage) == [
        [],
        [],
    ]


def save_as_deepspeed(path: Path, out: Path, stage: int) -> list[str]:
    """Save and resume under `enable`; list different weights."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    layout = Layout(stage=stage, experts=2)
    parts = [batch[dist.get_rank()] for batch in batches(dist.get_world_size())]
    plain = Training(path, layout).engine
    for save in (plain.save_checkpoint, plain.save_16bit_model):
        with pytest.raises(zerostart.ZerostartError, match=r"use zerostart\.save_state\(path, engine\)"):
            save(str(out / "own"))

    def start() -> Any:
        model = AutoModelForCausalLM.from_pretrained(path).train()
        return deepspeed.initialize(model=model, optimizer=optimizer(model), config=layout.config())[0]

    def step(engine: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
        return {n: t for n, t in zerostart.full_tensors(engine, rank=None) if t is not None}

    with zerostart.enabled("deepspeed", stage, layout.config(), expert_parallel=2, progress=False):
        engine = start()
        step(engine, parts[0])
        engine.save_checkpoint(str(out), client_state={"epoch": 3})
        expected = step(engine, parts[1])
        engine = start()
        _, client = engine.load_checkpoint(str(out))
        assert client == {"epoch": 3}
        resumed = step(engine, parts[1])
    return [name for name in expected if not torch.equal(resumed[name], expected[name])]


@pytest.mark.slow
def test_initialize_at_another_stage_is_refused(folder: Path) -> None:
    run_ranks(initialize_at_other_stages, 2, checkpoint("qwen3_moe", folder))


def initialize_at_other_stages(path: Path) -> None:
    import deepspeed

    for stage, other, experts in ((3, 2, 1), (3, 0, 1), (2, 3, 2), (1, 0, 2)):
        layout = Layout(stage=stage, experts=experts)
        model = zerostart.load(path, progress=False, **layout.options())
        message = f"loaded for DeepSpeed ZeRO-{stage}, but .* has ZeRO stage {other}; use the same stage"
        with pytest.raises(EngineError, match=message):
            deepspeed.initialize(model=model, optimizer=optimizer(model), config=Layout(stage=other).config())
    training = Training(path, Layout(), "experts")
    tokens = next(batches(2))[dist.get_rank()]
    with pytest.raises(EngineError, match=r"call model.enable_input_require_grads\(\) before"):
        training.engine(input_ids=tokens, labels=tokens, use_cache=False)
    training.model.enable_input_require_grads()
    training.engine.backward(training.engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    training.engine.step()
