"""A converter of the caller's that calculates, from files and from a mapping."""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

WIDTH = 96


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)


def converter(state: dict[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
    """What converters do: pop, drop, ask, iterate, rename, fuse, write in place, and calculate."""
    made: OrderedDict[str, torch.Tensor] = OrderedDict()
    state.pop("unwanted", None)
    heads = 4
    query = state.pop("attn.q.weight").view(heads, 2, WIDTH // heads // 2, WIDTH).transpose(1, 2)
    parts = [query.reshape(WIDTH, WIDTH) * 0.5, state.pop("attn.k.weight"), state.pop("attn.v.weight")]
    made["fused.weight"] = torch.cat(parts)
    bias = torch.zeros(3 * WIDTH)
    for number, name in enumerate("qkv"):
        bias[number * WIDTH : (number + 1) * WIDTH] = state.pop(f"attn.{name}.bias")
    made["fused.bias"] = bias
    for name, tensor in state.items():
        if name.startswith("norm."):
            tensor += 1
            made[name] = tensor
    made["out.weight"] = (state["up"] @ state["down"]).to(torch.float32)
    return made


def stored() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"attn.{n}.weight": (WIDTH, WIDTH) for n in "qkv"} | {f"attn.{n}.bias": (WIDTH,) for n in "qkv"}
    shapes |= {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,), "unwanted": (3,)}
    shapes |= {"up": (WIDTH, 5), "down": (5, WIDTH)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_equal_to_the_converter_run_on_real_tensors(engine: str, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(stored(), path)
    for lines in run_ranks(load_both, world_size, engine, path):
        assert lines == []


def load_both(engine: str, path: Path) -> list[str]:
    expected = converter(load_file(path))
    lines = []
    for source in (path, load_file(path)):
        model = zerostart.load(
            source, Small, engine=engine, converter=converter, chunk_size=1 << 16, progress=False
        )
        found = dict(zerostart.full_tensors(model, rank=None))
        lines += [name for name, want in expected.items() if not torch.equal(found[name], want)]
        report = zerostart.report(model)
        assert report.read_bytes == report.planned_bytes
        assert set(report.converted) == set(expected)
        assert report.computed_whole == ("out.weight",)
        assert "whole" in str(report)
    return lines


def test_a_converter_that_draws_random_numbers_is_refused() -> None:
    def noisy(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor + torch.randn(tensor.shape) for name, tensor in state.items()}

    def beside(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drawing = threading.Thread(target=torch.randn, args=(3,))
        drawing.start()
        drawing.join()
        return dict(state)

    stored, ended = Small().state_dict(), threading.Event()
    with pytest.raises(zerostart.ZerostartError, match="noisy draws random numbers"):
        zerostart.load(stored, Small, engine="fsdp2", converter=noisy, progress=False)
    # Those of another thread, as of an engine that generates meanwhile, are not its own.
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with pytest.raises(zerostart.ZerostartError, match="noisy draws random numbers"):
            zerostart.load(stored, Small, engine="fsdp2", converter=noisy, progress=False)
        zerostart.load(stored, Small, engine="fsdp2", converter=beside, progress=False)
    finally:
        ended.set()
        other.join()


def test_the_plan_says_what_is_computed_whole_and_what_it_costs() -> None:
    plan = zerostart.plan(stored(), world_size=2, engine="fsdp2", converter=converter, model=Small)
    assert plan.computed_whole == ("out.weight",)
    # Zeros that are written over are no calculation.
    assert plan.computed == ("fused.weight", "norm.weight", "norm.bias", "out.weight")
    # The whole product is in memory on every rank beside the shards, in fp32.
    assert all(rank.peak_host_bytes >= rank.device_bytes + WIDTH * WIDTH * 4 for rank in plan.ranks)


class SwapHalves(ConversionOps):
    """An operation of one's own that writes into slices."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        made = {}
        for name, tensors in input_dict.items():
            made[name] = swapped(tensors[0] if isinstance(tensors, list) else tensors)
        return made


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    half = len(out) // 2
    out[:half] = tensor[half : 2 * half]
    out[half : 2 * half].copy_(tensor[:half]).mul_(2)
    return out


def test_slice_writes_in_a_list_of_conversions(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3")
    conversions = [WeightConverter(["q_proj.weight"], ["q_proj.weight"], [SwapHalves()])]
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    model = zerostart.load(path, engine="fsdp2", converter=conversions, chunk_size=1 << 16, progress=False)
    found = dict(zerostart.full_tensors(model))
    changed = [name for name in expected if name.endswith("q_proj.weight")]
    assert sorted(zerostart.report(model).converted) == sorted(changed)
    for name, want in expected.items():
        assert torch.equal(found[name], swapped(want) if name in changed else want), name


def test_what_a_converter_did_wrong_is_told(tmp_path: Path) -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(4, 4)

    path = tmp_path / "model.safetensors"
    save_file({"attention.wq.weight": torch.ones(4, 4), "attention.wq.bias": torch.ones(4)}, path)

    def forgot(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"body.weight": state["attention.wq.weight"]}

    def mistyped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"body.weight": state["attention.wqq.weight"]}

    def load(**options: Any) -> None:
        zerostart.load(path, engine="fsdp2", progress=False, **options)

    with pytest.raises(zerostart.errors.CoverageError, match=r"as the converter gives it(.|\n)*body\.bias"):
        load(model=Small, converter=forgot)
    line = mistyped.__code__.co_firstlineno + 1
    told = rf"line {line} of .*test_converters\.py: KeyError: .*; the checkpoint has 'attention\.wq\.weight'"
    with pytest.raises(zerostart.errors.ConversionError, match=told):
        load(model=Small, converter=mistyped)
    with pytest.raises(zerostart.errors.ConfigError, match=r"model='Small' is a str; pass a class"):
        load(model="Small")
    absent = zerostart.errors.CheckpointNotFoundError
    path = tmp_path / "model.pt"  # the name of a file, and not of a repository
    with pytest.raises(absent, match=r"there is no such file or directory"):
        load(model=Small)
