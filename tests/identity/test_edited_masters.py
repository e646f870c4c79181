"""An edit of a few elements, at every stage: their fp32 masters follow, and all others keep their bits."""

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


def grouped(model: nn.Module, how: str) -> Any:
    if how == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in (NORM, MATRIX))
    kept = [p for p in model.parameters() if p.requires_grad]
    return [{"params": kept[1::2], "lr": 1e-3}, {"params": kept[::2]}] if how == "two" else kept


def halves(model: nn.Module) -> State:
    """What the engine computes with, by stock means; experts as this rank has them."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach().clone()
    return found


def masters(engine: Any) -> State:
    """What DeepSpeed steps, by stock means; a parameter without a master is its own."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
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
        found[name] = low[name] if master is None else master.clone()
    return found


def step(engine: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    tokens = torch.randint(3, VOCABULARY, (1, 8), generator=generator)
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()


def edited(model: nn.Module, names: list[str]) -> Iterator[str]:
    """Change every seventh element of each, on the last rank, and look at what the shards then hold."""
    last = dist.get_world_size() - 1
    for name in names:
        with zerostart.gathered(model, name, modifier_rank=last) as tensor:
            wanted = tensor.clone()
            wanted.view(-1)[::7] += 0.5
            if dist.get_rank() == last:
                tensor.copy_(wanted)
        with zerostart.gathered(model, name) as tensor:
            if not torch.equal(tensor, wanted):
                yield f"{name} was not changed as it should be"


def kept(was: State, low: State, after: State, changed: State) -> Iterator[str]:
    """``was`` and ``after`` are masters, ``low`` and ``changed`` what rounds to them, before and after."""
    for name, master in after.items():
        wanted = torch.where(low[name] == changed[name], was[name], changed[name].to(was[name].dtype))
        if not torch.equal(master, wanted):
            yield f"{(master != wanted).sum()} of {master.numel()} masters of {name} are others"


def held_of(whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``whole``: all of it, or its experts."""
    if whole.shape == held.shape:
        return whole
    return whole[dist.get_rank() * held.shape[0] :][: held.shape[0]]


def run(path: Path, case: Case) -> list[str]:
    import deepspeed

    config = case.config
    model = zerostart.load(
        path, zero_stage=case.stage, engine_config=config, expert_parallel=case.experts, progress=False
    )
    names = [NORM, MATRIX, EMBEDDING] + ([EXPERTS] if case.kind == "mixtral" else [])
    unread: State = {}
    if case.before:
        # The masters that this load would have had, of the checkpoint's own fp32 values.
        from transformers import AutoModelForCausalLM

        unread = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        low = halves(model)
        wrong = list(edited(model, names))
        changed = halves(model)
    groups = grouped(model, case.groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    if case.before:
        if case.stage == 0:  # Made by DeepSpeed, of the parameters.
            unread = {name: tensor.float() for name, tensor in low.items()}
        own = {name: held_of(unread[name].detach(), tensor) for name, tensor in low.items()}
        wrong += list(kept(own, low, masters(engine), changed))
    else:
        step(engine, 1)
        was, low = masters(engine), halves(model)
        wrong = list(edited(engine, names))
        changed = halves(model)
        wrong += list(kept(was, low, masters(engine), changed))
    if case.stage > 0 and not any(p.dtype == torch.float32 for p in model.parameters()):
        assert any((t != t.bfloat16()).any() for t in masters(engine).values()), "masters of more bits"
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    step(engine, 2)
    wrong += [f"{n} does not stay" for n, t in halves(model).items() if not torch.equal(t, changed[n])]
    engine.destroy()
    return wrong


def run_all(paths: dict[str, Path], cases: dict[str, Case]) -> list[str]:
    return [f"{name}: {line}" for name, case in cases.items() for line in run(paths[case.kind], case)]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    tied: dict[str, Any] = {"tie_word_embeddings": False}
    return {kind: checkpoint(kind, tmp_path, **tied) for kind in ("qwen3", "mixtral")}


@pytest.mark.slow
def test_masters_keep_their_bits_beside_an_edit(paths: dict[str, Path]) -> None:
    assert run_ranks(run_all, 2, paths, FAST) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_masters_keep_their_bits_beside_an_edit_with_every_option(name: str, paths: dict[str, Path]) -> None:
    assert run_ranks(run_all, 2, paths, {name: SLOW[name]}) == [[], []]


def moved_away(path: Path) -> None:
    import deepspeed

    config = Case(2).config  # At stage 3 DeepSpeed moves the states of its own CUDA optimizer alone.
    model = zerostart.load(path, zero_stage=2, engine_config=config, progress=False)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.offload_states(pin_memory=False)
    with pytest.raises(zerostart.ZerostartError, match=r"reload_states\(\) before"):
        zerostart.gathered(engine, MATRIX, modifier_rank=0).__enter__()
    engine.reload_states()
    assert list(edited(engine, [MATRIX])) == []


@pytest.mark.slow
def test_states_that_were_moved_away_are_not_edited(paths: dict[str, Path]) -> None:
    run_ranks(moved_away, 2, paths["qwen3"])
