"""Edits update the masters of the edited elements only."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.identity.test_deepspeed_checkpoints import OFFLOADED
from tests.identity.test_deepspeed_checkpoints import Case as Start
from tests.parity import VOCABULARY, checkpoint
from tests.ranks import run_ranks

NORM, MATRIX, EMBEDDING = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case(Start):
    """One way to start DeepSpeed's engine."""

    experts: int = 1
    kind: str = "qwen3"
    before: bool = False  # edit before deepspeed.initialize


FAST = {
    "stage 0": Case(0, groups="two"),
    "stage 1": Case(1, groups="two"),
    "stage 2, frozen": Case(2, groups="frozen"),
    "stage 3": Case(3, groups="two"),
    "stage 2, before": Case(2, before=True),
    "stage 3, before": Case(3, before=True),
    "stage 2, experts": Case(2, experts=2, kind="mixtral"),
    "stage 3, experts": Case(3, experts=2, kind="mixtral"),
}
SLOW = {
    "stage 0, before": Case(0, before=True),
    "stage 0 in fp32": Case(0, top={"bf16": {"enabled": False}}),
    "stage 1, BF16_Optimizer": Case(1, top={"data_types": {"grad_accum_dtype": "fp32"}}, groups="two"),
    "stage 1, offloaded": Case(1, OFFLOADED),
    "stage 2 in fp32": Case(2, top={"bf16": {"enabled": False}}, groups="two"),
    "stage 2, offloaded, aligned": Case(2, {"parameter_alignment": True, **OFFLOADED}, groups="two"),
    "stage 3, frozen": Case(3, groups="frozen"),
    "stage 3, small sub-groups": Case(3, {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}),
    "stage 3, hierarchical": Case(3, {"zero_hpz_partition_size": 2}),
    "stage 3, experts, before": Case(3, experts=2, kind="mixtral", before=True),
    "stage 2, experts, offloaded": Case(2, OFFLOADED, experts=2, kind="mixtral"),
}


def parameter_groups(model: nn.Module, kind: str) -> Any:
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in (NORM, MATRIX))
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[1::2], "lr": 1e-3}, {"params": trained[::2]}] if kind == "two" else trained


def halves(model: nn.Module) -> State:
    """Return the parameters that the engine computes with."""
    import deepspeed

    tensors = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                tensors[name] = parameter.detach().clone()
        else:
            tensors[name] = parameter.detach().clone()
    return tensors


def read_masters(engine: Any) -> State:
    """Return masters, or parameters that have none."""
    from deepspeed.utils import safe_get_full_fp32_param

    tensors = {}
    flat = {}
    for group, values in zip(
        getattr(engine.optimizer, "fp16_groups", []),
        getattr(engine.optimizer, "fp32_groups_flat", []),
        strict=False,
    ):
        parts = values.detach().split([p.numel() for p in group])
        flat |= {id(p): part.clone().view(p.shape) for p, part in zip(group, parts, strict=True)}
    low = halves(engine.module)
    for name, parameter in engine.module.named_parameters():
        master = None
        if parameter.requires_grad:
            master = flat.get(id(parameter)) if flat else safe_get_full_fp32_param(parameter)
        tensors[name] = low[name] if master is None else master.clone()
    return tensors


def step(engine: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    tokens = torch.randint(3, VOCABULARY, (1, 8), generator=generator)
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()


def edit(model: nn.Module, names: list[str]) -> Iterator[str]:
    """Change every seventh element; yield wrong results."""
    last = dist.get_world_size() - 1
    for name in names:
        with zerostart.gathered(model, name, modifier_rank=last) as tensor:
            expected = tensor.clone()
            expected.view(-1)[::7] += 0.5
            if dist.get_rank() == last:
                tensor.copy_(expected)
        with zerostart.gathered(model, name) as tensor:
            if not torch.equal(tensor, expected):
                yield f"{name} was not changed as it should be"


def check_masters(before: State, low: State, after: State, changed: State) -> Iterator[str]:
    """Yield tensors whose masters do not follow the edit."""
    for name, master in after.items():
        expected = torch.where(low[name] == changed[name], before[name], changed[name].to(before[name].dtype))
        if not torch.equal(master, expected):
            yield f"{(master != expected).sum()} of {master.numel()} masters of {name} are wrong"


def part_of(whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts, or all of ``whole``."""
    if whole.shape == local.shape:
        return whole
    return whole[dist.get_rank() * local.shape[0] :][: local.shape[0]]


def run(path: Path, case: Case) -> list[str]:
    import deepspeed

    config = case.config
    model = zerostart.load(
        path, zero_stage=case.stage, engine_config=config, expert_parallel=case.experts, progress=False
    )
    names = [NORM, MATRIX, EMBEDDING] + ([EXPERTS] if case.kind == "mixtral" else [])
    source: State = {}
    if case.before:
        # The masters that this load reads: the checkpoint's fp32 values.
        from transformers import AutoModelForCausalLM

        source = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        low = halves(model)
        errors = list(edit(model, names))
        changed = halves(model)
    groups = parameter_groups(model, case.groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    if case.before:
        if case.stage == 0:  # DeepSpeed makes masters from the parameters
            source = {name: tensor.float() for name, tensor in low.items()}
        before = {name: part_of(source[name].detach(), tensor) for name, tensor in low.items()}
        errors += list(check_masters(before, low, read_masters(engine), changed))
    else:
        step(engine, 1)
        before, low = read_masters(engine), halves(model)
        errors = list(edit(engine, names))
        changed = halves(model)
        errors += list(check_masters(before, low, read_masters(engine), changed))
    if case.stage > 0 and not any(p.dtype == torch.float32 for p in model.parameters()):
        assert any((t != t.bfloat16()).any() for t in read_masters(engine).values()), "masters have more bits"
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    step(engine, 2)
    errors += [f"{n} is undone" for n, t in halves(model).items() if not torch.equal(t, changed[n])]
    engine.destroy()
    return errors


def run_all(paths: dict[str, Path], cases: dict[str, Case]) -> list[str]:
    return [f"{name}: {line}" for name, case in cases.items() for line in run(paths[case.kind], case)]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    tied: dict[str, Any] = {"tie_word_embeddings": False}
    return {kind: checkpoint(kind, tmp_path, **tied) for kind in ("qwen3", "mixtral")}


@pytest.mark.slow
def test_masters_keep_their_bits_around_an_edit(paths: dict[str, Path]) -> None:
    assert run_ranks(run_all, 2, paths, FAST) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_masters_keep_their_bits_with_every_option(name: str, paths: dict[str, Path]) -> None:
    assert run_ranks(run_all, 2, paths, {name: SLOW[name]}) == [[], []]


def edit_offloaded(path: Path) -> None:
    import deepspeed

    config = Case(2).config  # at stage 3, DeepSpeed only moves states of its own CUDA optimizer
    model = zerostart.load(path, zero_stage=2, engine_config=config, progress=False)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.offload_states(pin_memory=False)
    with pytest.raises(zerostart.ZerostartError, match=r"reload_states\(\) before"):
        zerostart.gathered(engine, MATRIX, modifier_rank=0).__enter__()
    engine.reload_states()
    assert list(edit(engine, [MATRIX])) == []


@pytest.mark.slow
def test_offloaded_states_are_not_edited(paths: dict[str, Path]) -> None:
    run_ranks(edit_offloaded, 2, paths["qwen3"])
