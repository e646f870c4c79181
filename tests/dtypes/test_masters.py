"""DeepSpeed's fp32 masters start from what the checkpoint stores, where the parameters have been rounded."""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints

F32, BF16 = torch.float32, torch.bfloat16
State = dict[str, torch.Tensor]


def config_of(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,  # Absent means 1.0.
        "zero_optimization": {"stage": 3, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }


def expected_of(path: Path, dtype: torch.dtype) -> State:
    """Transformers' own unsharded load: parameters by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


def whole_halves(model: nn.Module) -> State:
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.data.clone()
    return found


def masters_in(model: nn.Module) -> State:
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters() if p.requires_grad}


def unlike(found: State, expected: State) -> list[str]:
    lines = list(expected.keys() ^ found.keys())
    for name in expected.keys() & found.keys():
        one, other = found[name], expected[name]
        if one.dtype != other.dtype or not torch.equal(one, other):
            lines.append(f"{name}: {one.dtype} and {other.dtype}, or other values")
    return lines


def start(model: nn.Module, config: dict[str, Any], split: bool = False) -> Any:
    """The engine over ``model`` with a client AdamW; ``split``: of two parameter groups, in another order."""
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: Any = parameters
    if split:
        groups = [{"params": parameters[1::2], "lr": 1e-3}, {"params": parameters[::2][::-1], "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


# --- Masters equal the stored values, and without the option those of the stock route.


def check_variants(path: Path) -> dict[str, list[str]]:
    full, half = expected_of(path, F32), expected_of(path, BF16)
    lines = {}
    variants: dict[str, tuple[dict[str, Any], bool]] = {
        "plain": ({}, False),
        "sub-groups": ({"sub_group_size": 900}, False),
        "parameter groups": ({"stage3_param_persistence_threshold": 0}, True),
        "offloaded": ({"offload_optimizer": {"device": "cpu"}, "sub_group_size": 900}, True),
    }
    for name, (zero, split) in variants.items():
        config = config_of(**zero)
        model = zerostart.load(path, engine_config=config, progress=False)
        engine = start(model, config, split)
        lines[name] = unlike(masters_in(model), full) + unlike(whole_halves(model), half)
        engine.destroy()
    model = zerostart.load(path, engine_config=config_of(), progress=False)
    frozen = [p.requires_grad_(False) for p in list(model.parameters())[::3]]
    engine = start(model, config_of())
    trained = {n: full[n] for n, p in model.named_parameters() if p.requires_grad}
    lines["frozen"] = unlike(masters_in(model), trained) + unlike(whole_halves(model), half)
    assert frozen
    engine.destroy()
    model = zerostart.load(path, engine_config=config_of(), progress=False, fp32_masters=False)
    engine = start(model, config_of())
    rounded = {name: tensor.float() for name, tensor in half.items()}
    lines["off"] = unlike(masters_in(model), rounded) + unlike(whole_halves(model), half)
    engine.destroy()
    two = [zerostart.load(path, engine_config=config_of(), progress=False) for _ in range(2)]
    with torch.no_grad():  # The second is another model by now: its masters follow it.
        for parameter in two[1].parameters():
            parameter.ds_tensor.mul_(2)  # type: ignore[operator]
    engines = [start(model, config_of()) for model in two]
    doubled = {name: tensor.float() * 2 for name, tensor in half.items()}
    lines["first of two"] = unlike(masters_in(two[0]), full)
    lines["second, changed"] = unlike(masters_in(two[1]), doubled)
    for engine in engines:
        engine.destroy()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), [("qwen3_moe_aligned", 2), ("qwen3", 1), ("qwen3", 3)])
def test_masters_are_what_the_checkpoint_stores(
    kind: str, world_size: int, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints(kind, F32, sharded=True)
    for found in run_ranks(check_variants, world_size, path, timeout=240):
        assert not {name: lines for name, lines in found.items() if lines}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 14))
        self.bias = nn.Parameter(torch.zeros(9))


def calculate(state: State) -> State:
    """Stored twice as large, transposed, and in two parts."""
    parts = [state["first"].t(), state["second"].t()]
    return {"weight": torch.cat(parts) * 0.3, "bias": state["bias"]}


def masters_of_computed() -> list[str]:
    torch.manual_seed(0)
    stored = {"first": torch.randn(14, 4), "second": torch.randn(14, 5), "bias": torch.randn(9)}
    model = zerostart.load(
        stored, model=Halves, converter=calculate, dtype=BF16, engine_config=config_of(), progress=False
    )
    start(model, config_of())
    return unlike(masters_in(model), calculate(stored))


def test_masters_of_what_a_converter_calculates_are_not_rounded() -> None:
    assert run_ranks(masters_of_computed, 2) == [[], []]


# --- What the masters are read from is no more, or other than it was.


def held(path: Path, keep: str) -> Any:
    """Load from a mapping; returns the differences, and whether the mapping was let go."""
    from transformers import AutoModelForCausalLM

    mapping: State = dict(AutoModelForCausalLM.from_pretrained(path, dtype=F32).state_dict())
    build = _builder(path)
    model = zerostart.load(mapping, model=build, dtype=BF16, engine_config=config_of(), progress=False)
    first = next(iter(mapping.values()))
    if keep == "gone":
        watched = weakref.ref(first)
        del mapping, first
        gc.collect()
        assert watched() is None
    elif keep == "changed":
        with torch.no_grad():
            first.add_(1)
    start(model, config_of())
    return unlike(masters_in(model), expected_of(path, F32))


def _builder(path: Path) -> Callable[[], nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def touched(path: Path, how: str) -> Any:
    config = config_of()
    model = zerostart.load(path, engine_config=config, progress=False)
    file = sorted(path.glob("*.safetensors"))[-1]
    dist.barrier()
    if dist.get_rank() == 0:
        if how == "removed":
            file.unlink()
        else:
            os.utime(file, ns=(1, 1))
    dist.barrier()
    start(model, config)


@pytest.mark.slow
def test_a_mapping_serves_the_masters(checkpoints: TinyCheckpoints) -> None:
    assert run_ranks(held, 2, checkpoints("qwen3_moe", F32), "kept") == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "kind", "text"),
    [
        ("gone", "zerostart.errors.EngineError", "the mapping that the model was loaded from is gone"),
        ("changed", "zerostart.errors.ReadError", "was changed in place since the model was loaded"),
    ],
)
def test_a_mapping_that_is_gone_or_changed_is_told_on_every_rank(
    keep: str, kind: str, text: str, checkpoints: TinyCheckpoints
) -> None:
    outcomes = rank_outcomes(held, 2, checkpoints("qwen3", F32), keep, grace=20)
    assert [outcome.error for outcome in outcomes] == [kind] * 2, outcomes[0].traceback
    assert all(text in outcome.message for outcome in outcomes)
    assert all("fp32_masters=False" in outcome.message for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "rewritten"])
def test_a_file_that_is_not_what_was_loaded_is_told_on_every_rank(
    how: str, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints.edited(checkpoints("qwen3", F32, sharded=True), f"qwen3-{how}", lambda tensors: None)
    outcomes = rank_outcomes(touched, 2, path, how, grace=20)
    assert [outcome.error for outcome in outcomes] == ["zerostart.errors.ReadError"] * 2
    assert all("was changed since the model was loaded" in o.message for o in outcomes)
