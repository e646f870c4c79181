"""fp32 masters start from the checkpoint's values."""

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
        "gradient_clipping": 0.0,  # default: 1.0
        "zero_optimization": {"stage": 3, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }


def expected_of(path: Path, dtype: torch.dtype) -> State:
    """Load with transformers, unsharded; return parameters by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


def gather(model: nn.Module) -> State:
    import deepspeed

    tensors = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            tensors[name] = parameter.data.clone()
    return tensors


def masters_of(model: nn.Module) -> State:
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters() if p.requires_grad}


def differences(actual: State, expected: State) -> list[str]:
    lines = list(expected.keys() ^ actual.keys())
    for name in expected.keys() & actual.keys():
        value, reference = actual[name], expected[name]
        if value.dtype != reference.dtype or not torch.equal(value, reference):
            lines.append(f"{name}: {value.dtype} and {reference.dtype}, or other values")
    return lines


def initialize(model: nn.Module, config: dict[str, Any], split: bool = False) -> Any:
    """Start the engine; ``split`` makes two reordered groups."""
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: Any = parameters
    if split:
        groups = [{"params": parameters[1::2], "lr": 1e-3}, {"params": parameters[::2][::-1], "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


# --- Masters equal the stored values, or with `fp32_masters=False` those of the stock route.


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
        engine = initialize(model, config, split)
        lines[name] = differences(masters_of(model), full) + differences(gather(model), half)
        engine.destroy()
    model = zerostart.load(path, engine_config=config_of(), progress=False)
    frozen = [p.requires_grad_(False) for p in list(model.parameters())[::3]]
    engine = initialize(model, config_of())
    trained = {n: full[n] for n, p in model.named_parameters() if p.requires_grad}
    lines["frozen"] = differences(masters_of(model), trained) + differences(gather(model), half)
    assert frozen
    engine.destroy()
    model = zerostart.load(path, engine_config=config_of(), progress=False, fp32_masters=False)
    engine = initialize(model, config_of())
    rounded = {name: tensor.float() for name, tensor in half.items()}
    lines["off"] = differences(masters_of(model), rounded) + differences(gather(model), half)
    engine.destroy()
    models = [zerostart.load(path, engine_config=config_of(), progress=False) for _ in range(2)]
    with torch.no_grad():  # The masters of the changed model follow its parameters.
        for parameter in models[1].parameters():
            parameter.ds_tensor.mul_(2)  # type: ignore[operator]
    engines = [initialize(model, config_of()) for model in models]
    doubled = {name: tensor.float() * 2 for name, tensor in half.items()}
    lines["first of two"] = differences(masters_of(models[0]), full)
    lines["second, changed"] = differences(masters_of(models[1]), doubled)
    for engine in engines:
        engine.destroy()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), [("qwen3_moe_aligned", 2), ("qwen3", 1), ("qwen3", 3)])
def test_masters_equal_the_stored_values(kind: str, world_size: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints(kind, F32, sharded=True)
    for differences_by_variant in run_ranks(check_variants, world_size, path, timeout=240):
        assert not {name: lines for name, lines in differences_by_variant.items() if lines}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 14))
        self.bias = nn.Parameter(torch.zeros(9))


def convert(state: State) -> State:
    """Transpose, join and scale."""
    parts = [state["first"].t(), state["second"].t()]
    return {"weight": torch.cat(parts) * 0.3, "bias": state["bias"]}


def compare_converted_masters() -> list[str]:
    torch.manual_seed(0)
    state = {"first": torch.randn(14, 4), "second": torch.randn(14, 5), "bias": torch.randn(9)}
    model = zerostart.load(
        state, model=Linear, converter=convert, dtype=BF16, engine_config=config_of(), progress=False
    )
    initialize(model, config_of())
    return differences(masters_of(model), convert(state))


def test_masters_of_converted_tensors_are_not_rounded() -> None:
    assert run_ranks(compare_converted_masters, 2) == [[], []]


# --- The source of the masters has changed or is gone.


def load_from_mapping(path: Path, state: str) -> Any:
    """Load from a mapping that changes; compare the masters."""
    from transformers import AutoModelForCausalLM

    mapping: State = dict(AutoModelForCausalLM.from_pretrained(path, dtype=F32).state_dict())
    build = _builder(path)
    model = zerostart.load(mapping, model=build, dtype=BF16, engine_config=config_of(), progress=False)
    first = next(iter(mapping.values()))
    if state == "gone":
        reference = weakref.ref(first)
        del mapping, first
        gc.collect()
        assert reference() is None
    elif state == "changed":
        with torch.no_grad():
            first.add_(1)
    initialize(model, config_of())
    return differences(masters_of(model), expected_of(path, F32))


def _builder(path: Path) -> Callable[[], nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def load_and_change_file(path: Path, change: str) -> Any:
    config = config_of()
    model = zerostart.load(path, engine_config=config, progress=False)
    file = sorted(path.glob("*.safetensors"))[-1]
    dist.barrier()
    if dist.get_rank() == 0:
        if change == "removed":
            file.unlink()
        else:
            os.utime(file, ns=(1, 1))
    dist.barrier()
    initialize(model, config)


@pytest.mark.slow
def test_masters_are_read_from_a_mapping(checkpoints: TinyCheckpoints) -> None:
    assert run_ranks(load_from_mapping, 2, checkpoints("qwen3_moe", F32), "unchanged") == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ("gone", "zerostart.errors.EngineError", "the mapping that the model was loaded from is gone"),
        ("changed", "zerostart.errors.ReadError", "was changed in place since the model was loaded"),
    ],
)
def test_deleted_or_changed_mapping_is_an_error_on_every_rank(
    state: str, kind: str, text: str, checkpoints: TinyCheckpoints
) -> None:
    outcomes = rank_outcomes(load_from_mapping, 2, checkpoints("qwen3", F32), state, grace=20)
    assert [outcome.error for outcome in outcomes] == [kind] * 2, outcomes[0].traceback
    assert all(text in outcome.message for outcome in outcomes)
    assert all("fp32_masters=False" in outcome.message for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["removed", "rewritten"])
def test_changed_file_is_an_error_on_every_rank(change: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints.edited(
        checkpoints("qwen3", F32, sharded=True), f"qwen3-{change}", lambda tensors: None
    )
    outcomes = rank_outcomes(load_and_change_file, 2, path, change, grace=20)
    assert [outcome.error for outcome in outcomes] == ["zerostart.errors.ReadError"] * 2
    assert all("was changed since the model was loaded" in o.message for o in outcomes)
