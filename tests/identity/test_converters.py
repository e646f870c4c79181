"""Converters that compute, with files and mappings."""

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
    """Convert with all kinds of dictionary and tensor operations."""
    out: OrderedDict[str, torch.Tensor] = OrderedDict()
    state.pop("unwanted", None)
    heads = 4
    query = state.pop("attn.q.weight").view(heads, 2, WIDTH // heads // 2, WIDTH).transpose(1, 2)
    parts = [query.reshape(WIDTH, WIDTH) * 0.5, state.pop("attn.k.weight"), state.pop("attn.v.weight")]
    out["fused.weight"] = torch.cat(parts)
    bias = torch.zeros(3 * WIDTH)
    for number, name in enumerate("qkv"):
        bias[number * WIDTH : (number + 1) * WIDTH] = state.pop(f"attn.{name}.bias")
    out["fused.bias"] = bias
    for name, tensor in state.items():
        if name.startswith("norm."):
            tensor += 1
            out[name] = tensor
    out["out.weight"] = (state["up"] @ state["down"]).to(torch.float32)
    return out


def random_state_dict() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"attn.{n}.weight": (WIDTH, WIDTH) for n in "qkv"} | {f"attn.{n}.bias": (WIDTH,) for n in "qkv"}
    shapes |= {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,), "unwanted": (3,)}
    shapes |= {"up": (WIDTH, 5), "down": (5, WIDTH)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_equals_the_converter_on_real_tensors(engine: str, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_state_dict(), path)
    for errors in run_ranks(load_both, world_size, engine, path):
        assert errors == []


def load_both(engine: str, path: Path) -> list[str]:
    expected = converter(load_file(path))
    errors = []
    for source in (path, load_file(path)):
        model = zerostart.load(
            source, Small, engine=engine, converter=converter, chunk_size=1 << 16, progress=False
        )
        actual = dict(zerostart.full_tensors(model, rank=None))
        errors += [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
        report = zerostart.report(model)
        assert report.read_bytes == report.planned_bytes
        assert set(report.converted) == set(expected)
        assert report.computed_whole == ("out.weight",)
        assert "whole" in str(report)
    return errors


def test_converter_that_draws_random_numbers_is_refused() -> None:
    def noisy(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor + torch.randn(tensor.shape) for name, tensor in state.items()}

    def draw_in_thread(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        thread = threading.Thread(target=torch.randn, args=(3,))
        thread.start()
        thread.join()
        return dict(state)

    state, stop = Small().state_dict(), threading.Event()
    with pytest.raises(zerostart.ZerostartError, match="noisy draws random numbers"):
        zerostart.load(state, Small, engine="fsdp2", converter=noisy, progress=False)
    # Random numbers drawn by another thread do not count.
    waiting = threading.Thread(target=stop.wait)
    waiting.start()
    try:
        with pytest.raises(zerostart.ZerostartError, match="noisy draws random numbers"):
            zerostart.load(state, Small, engine="fsdp2", converter=noisy, progress=False)
        zerostart.load(state, Small, engine="fsdp2", converter=draw_in_thread, progress=False)
    finally:
        stop.set()
        waiting.join()


def test_plan_reports_whole_computations_and_their_memory() -> None:
    plan = zerostart.plan(random_state_dict(), world_size=2, engine="fsdp2", converter=converter, model=Small)
    assert plan.computed_whole == ("out.weight",)
    # Overwritten zeros are no computation.
    assert plan.computed == ("fused.weight", "norm.weight", "norm.bias", "out.weight")
    # In addition to the shards, every rank holds the whole product in fp32.
    assert all(rank.peak_host_bytes >= rank.device_bytes + WIDTH * WIDTH * 4 for rank in plan.ranks)


class SwapHalves(ConversionOps):
    """A custom operation that writes into slices."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        out = {}
        for name, tensors in input_dict.items():
            out[name] = swap_halves(tensors[0] if isinstance(tensors, list) else tensors)
        return out


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
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
    actual = dict(zerostart.full_tensors(model))
    changed = [name for name in expected if name.endswith("q_proj.weight")]
    assert sorted(zerostart.report(model).converted) == sorted(changed)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], swap_halves(tensor) if name in changed else tensor), name


def test_converter_mistakes_are_named(tmp_path: Path) -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(4, 4)

    path = tmp_path / "model.safetensors"
    save_file({"attention.wq.weight": torch.ones(4, 4), "attention.wq.bias": torch.ones(4)}, path)

    def forget_bias(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"body.weight": state["attention.wq.weight"]}

    def misspell(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"body.weight": state["attention.wqq.weight"]}

    def load(**options: Any) -> None:
        zerostart.load(path, engine="fsdp2", progress=False, **options)

    with pytest.raises(zerostart.errors.CoverageError, match=r"as the converter gives it(.|\n)*body\.bias"):
        load(model=Small, converter=forget_bias)
    line = misspell.__code__.co_firstlineno + 1
    text = rf"line {line} of .*test_converters\.py: KeyError: .*; the checkpoint has 'attention\.wq\.weight'"
    with pytest.raises(zerostart.errors.ConversionError, match=text):
        load(model=Small, converter=misspell)
    with pytest.raises(zerostart.errors.ConfigError, match=r"model='Small' is a str; pass a class"):
        load(model="Small")
    not_found = zerostart.errors.CheckpointNotFoundError
    path = tmp_path / "model.pt"  # a file name, not a repository id
    with pytest.raises(not_found, match=r"there is no such file or directory"):
        load(model=Small)
