"""Push into engines inside the trainer ranks, and compare with their load of a save."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zerostart
from tests.npu_ranks import run_npu_ranks
from tests.ranks import run_ranks
from tests.refit import workers
from tests.refit.test_refit import _change
from tests.tiny import TINY, TinyCheckpoints
from zerostart import serving
from zerostart.errors import ConfigError, ConversionError, PeerError

BF16 = torch.bfloat16


class _Broken(nn.Module):
    """An engine whose loader fails."""

    def load_weights(self, weights: Any) -> None:
        raise RuntimeError("no such layer")


class _ToldDriver:
    """A driver whose one worker is in the rank; it may reject versions."""

    workers, in_process = 1, True

    def __init__(self, engine: nn.Module, failing: bool) -> None:
        self.receiver = serving.Receiver(engine)
        self.failing, self.versions = failing, list[int]()

    def worker(self) -> serving.Receiver:
        return self.receiver

    def served(self, version: int) -> None:
        if self.failing:
            raise RuntimeError("the engine is asleep")
        self.versions.append(version)

    join = follow = leave = served


def _push(path: Path, out: Path, options: dict[str, Any], parts: int, device: str = "cpu") -> list[str]:
    """On one rank: push twice into its part of an engine; the last rank then fails."""
    config, rank = dict(TINY["qwen3_even"][1]), dist.get_rank() if dist.is_initialized() else 0
    last = rank + 1 == (dist.get_world_size() if dist.is_initialized() else 1)
    model = zerostart.load(path, progress=False, **options)
    engine = workers.Engine(config, rank % parts, parts, BF16).to(device)
    wrong: list[str] = []
    with zerostart.refit(model, engine, timeout=60) as refitter:
        for version in (1, 2):
            _change(model, 1.0 if version == 1 else -0.5)
            report: Any = refitter.push()
            assert report.version == version
            assert len({worker.name for worker in report.workers}) == len(report.workers) > rank
            assert report.moved_bytes <= report.wanted_bytes
            assert report.transport == "local" + (f" ({device})" if device != "cpu" else "")
            zerostart.save(model, out / f"saved-{version}")
            expected = workers.loaded(config, rank % parts, parts, out / f"saved-{version}", BF16)
            actual = engine.state_dict()
            wrong += [name for name in expected if not torch.equal(actual[name].cpu(), expected[name])]
    told = _ToldDriver(engine, last)
    with (
        zerostart.refit(model, told) as refitter,
        pytest.raises(PeerError, match="engine is asleep"),
    ):
        refitter.push()
    assert (told.receiver.version, told.versions) == (1, [] if last else [1])
    with pytest.raises(ConversionError, match="no such layer"):
        zerostart.refit(model, _Broken() if last else engine, timeout=30)
    return wrong


CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "two": (2, {"engine": "fsdp2"}, 2),
    "one": (1, {"engine": "fsdp2"}, 1),
    "zero3": (2, {"zero_stage": 3}, 1),
    "four": (4, {"zero_stage": 3}, 2),
    "tensors": (4, {"engine": "fsdp2", "tensor_parallel": 2}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_part(checkpoints: TinyCheckpoints, tmp_path: Path, case: str) -> None:
    ranks, options, parts = CASES[case]
    path = checkpoints("qwen3_even", BF16)
    assert run_ranks(_push, ranks, path, tmp_path, options, parts, timeout=150) == [[]] * ranks


def _push_there(path: Path, out: Path) -> list[str]:
    dist.init_process_group("cpu:gloo,npu:hccl")
    return _push(path, out, {"engine": "fsdp2"}, 2, "npu")


@pytest.mark.slow
def test_on_an_accelerator_nothing_comes_to_the_host(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Use the pretend accelerator, whose memory the host cannot read."""
    path = checkpoints("qwen3_even", BF16)
    assert run_npu_ranks(_push_there, 2, path, tmp_path) == [[], []]


class _Rows(nn.Module):
    """An engine with only a table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 16)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name in ("table.weight", "nothing"):
                self.get_parameter(name).data.copy_(tensor)


def test_a_model_whose_tensors_change_between_pushes() -> None:
    """Each push compares model and engine again, and refuses an engine that does not fit."""
    model, engine = nn.Module(), _Rows(10)
    model.table = nn.Embedding(10, 16)
    with zerostart.refit(model, engine) as refitter:
        assert refitter.push().untaken == ()
        model.head = nn.Linear(3, 3)
        assert refitter.push().untaken == ("head.weight", "head.bias")
        assert refitter.push().version == 3
        before, model.table = model.table, nn.Embedding(11, 16)
        with pytest.raises(ConversionError, match="the loading of _Rows failed"):
            refitter.push()
        assert torch.equal(engine.table.weight, before.weight)
        model.table = nn.Embedding(10, 16)
        assert refitter.push().version == 4
        assert torch.equal(engine.table.weight, model.table.weight)


class _Adapter(nn.Module):
    """An engine's adapter under PEFT's names, with both factors in one tensor."""

    def __init__(self, rank: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.factors = inputs, nn.Parameter(torch.zeros(rank, inputs + outputs))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "base_model.model.head.lora_A.weight":
                self.factors.data[:, : self.inputs].copy_(tensor)
            else:
                assert name == "base_model.model.head.lora_B.weight", name
                self.factors.data[:, self.inputs :].copy_(tensor.T)


def test_an_adapter_is_sent_alone(tmp_path: Path) -> None:
    """Only PEFT's own tensors are sent."""
    peft = pytest.importorskip("peft")
    model = nn.Module()
    model.table, model.head = nn.Embedding(10, 16), nn.Linear(5, 7)
    config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    adapted, engine = peft.get_peft_model(model, config), _Adapter(2, 5, 7)
    adapted.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    with zerostart.refit(adapted, engine, merge_adapters=False) as refitter:
        report = refitter.push()
    assert report.owned_bytes == report.moved_bytes + report.wanted_bytes == engine.factors.nbytes
    expected = torch.cat(
        [saved["base_model.model.head.lora_A.weight"], saved["base_model.model.head.lora_B.weight"].T], 1
    )
    assert torch.equal(engine.factors, expected)
    streamed = dict(zerostart.weight_source(adapted, merge_adapters=False))
    assert streamed.keys() == saved.keys()
    assert all(torch.equal(streamed[name], saved[name]) for name in saved)
    adapted.add_adapter("other", config)
    with pytest.raises(ConfigError, match=r"exactly one adapter, but this Module has 2 \(default, other\)"):
        zerostart.refit(adapted, engine, merge_adapters=False)
    with pytest.raises(ConfigError, match=r"exactly one adapter, but this Linear has none"):
        zerostart.refit(nn.Linear(2, 2), engine, merge_adapters=False)


def _other_arguments(arguments: dict[str, list[Any]]) -> list[str]:
    """Return the error for each argument that differs between ranks."""
    model, errors = nn.Linear(3, 2), []
    for name, values in arguments.items():
        with pytest.raises(ConfigError) as error:
            zerostart.refit(model, **{name: values[dist.get_rank()]})
        errors.append(str(error.value))
    return errors


@pytest.mark.slow
def test_different_arguments_on_ranks_are_an_error() -> None:
    arguments = {
        "dtype": [None, BF16],
        "timeout": [4, 5],
        "strict": [True, False],
    }
    first, second = run_ranks(_other_arguments, 2, arguments, timeout=60)
    assert first == second
    assert first[1].startswith(
        "zerostart.refit has RefitSettings(workers=None, dtype=None, merge_adapters=True, timeout=4, "
    )
    assert "timeout=5, strict=True) on rank 1: call it with the same arguments" in first[1]
