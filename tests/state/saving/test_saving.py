"""A saved sharded model equals the loaded checkpoint."""

import errno
import json
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

F32, BF16 = torch.float32, torch.bfloat16
Options = dict[str, Any]
DEEPSPEED3: Options = {"engine": "deepspeed", "zero_stage": 3}
DEEPSPEED2: Options = {"engine": "deepspeed", "zero_stage": 2}
FSDP2: Options = {"engine": "fsdp2", "zero_stage": 3}

#: Number of ranks to cases: (checkpoint kind, its dtype, load options).
ROUND_TRIPS: dict[int, dict[str, tuple[str, torch.dtype, Options]]] = {
    1: {
        "qwen3_moe": ("qwen3_moe", BF16, FSDP2),
    },
    2: {
        "tied, zero3": ("qwen3", F32, DEEPSPEED3),
        "tied, zero2": ("qwen3", BF16, DEEPSPEED2),
        "experts, fsdp2, expert parallel": ("qwen3_moe", BF16, {**FSDP2, "expert_parallel": 2}),
        "gpt_oss": ("gpt_oss", BF16, FSDP2),
    },
    4: {
        "tied, replicas": ("qwen3", BF16, {**FSDP2, "zero_stage": 0}),
        "tied, tensor parallel": ("qwen3_even", BF16, {**FSDP2, "tensor_parallel": 2}),
        "experts, fsdp2": ("qwen3_moe", F32, FSDP2),
        "experts, zero2, expert parallel": ("mixtral", BF16, {**DEEPSPEED2, "expert_parallel": 2}),
        "experts, zero3, expert parallel": ("mixtral", BF16, {**DEEPSPEED3, "expert_parallel": 2}),
        "hsdp": ("mixtral", F32, {**FSDP2, "engine_config": {"replicate": 2}}),
        "hierarchical": (
            "qwen3",
            BF16,
            {**DEEPSPEED3, "engine_config": {"zero_optimization": {"zero_hpz_partition_size": 2}}},
        ),
    },
    3: {
        "offloaded": (
            "qwen3",
            BF16,
            {**DEEPSPEED3, "engine_config": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
        ),
        "experts, zero3": ("mixtral", BF16, DEEPSPEED3),
        "experts, fsdp2": ("mixtral", BF16, FSDP2),
        "gpt_oss": ("gpt_oss", F32, DEEPSPEED3),
    },
}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder's safetensors files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            tensors.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
    return tensors


def assert_same_tensors(actual: Path, reference: Path) -> None:
    """Compare names, dtypes, shapes and bits of two folders."""
    tensors, expected = tensors_in(actual), tensors_in(reference)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        bits = tensors[name].reshape(-1).view(torch.uint8)
        assert torch.equal(bits, tensor.reshape(-1).view(torch.uint8)), name


def save_all(tasks: dict[str, tuple[Path, Options]], out: Path) -> dict[str, str]:
    """Load and save each task; return errors by task."""
    errors = {}
    for name, (path, options) in tasks.items():
        try:
            model = zerostart.load(path, progress=False, **options)
            report = zerostart.save(model, out / name, max_shard_size="20KB")
            assert not report.own_names, report.own_names
        except Exception:
            errors[name] = traceback.format_exc()
    return errors


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_round_trip(size: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Saving restores the checkpoint, and plain transformers opens it."""
    from transformers import AutoModelForCausalLM

    tasks = {n: (checkpoints(kind, dtype), o) for n, (kind, dtype, o) in ROUND_TRIPS[size].items()}
    assert run_ranks(save_all, size, tasks, tmp_path, timeout=300) == [{}] * size
    for name, (path, _) in tasks.items():
        assert_same_tensors(tmp_path / name, path)
        reopened = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        reference = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        assert reopened.config.to_diff_dict() == reference.config.to_diff_dict()
        expected = reference.state_dict()
        for key, tensor in reopened.state_dict().items():
            assert torch.equal(tensor, expected[key]), f"{name}: {key}"


def plain_stack() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))


def convert_plain_stack(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transpose, split and rename tensors."""
    first, last = state["both"].split([10, 3])
    others = {name: tensor for name, tensor in state.items() if name not in ("both", "kernel")}
    return {"0.weight": state["kernel"].t().contiguous(), "0.bias": first, "2.bias": last, **others}


def test_plain_module_through_a_converter(tmp_path: Path) -> None:
    """Buffers, transposed and split tensors are converted back."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    state = {name: tensor.clone() for name, tensor in plain_stack().state_dict().items()}
    state["1.running_mean"] = torch.randn(10)
    state["kernel"] = state.pop("0.weight").t().contiguous()
    state["both"] = torch.cat([state.pop("0.bias"), state.pop("2.bias")])
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    model = zerostart.load(tmp_path / "in", model=plain_stack, converter=convert_plain_stack, engine="fsdp2")
    report = zerostart.save(model, tmp_path / "out")
    assert report.own_names == {}
    assert report.written_bytes == report.total_bytes == sum(t.nbytes for t in state.values())
    assert_same_tensors(tmp_path / "out", tmp_path / "in")


def test_calculated_value_keeps_the_model_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def halve(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": state["kernel"] * 0.5, "bias": state["bias"]}

    (tmp_path / "in").mkdir()
    weights = {"kernel": torch.randn(4, 3), "bias": torch.randn(4)}
    save_file(weights, tmp_path / "in" / "model.safetensors")
    model = zerostart.load(
        tmp_path / "in", model=lambda: torch.nn.Linear(3, 4), converter=halve, engine="fsdp2"
    )
    report = zerostart.save(model, tmp_path / "out")
    assert set(report.own_names) == {"weight"}
    assert "calculated" in report.own_names["weight"]
    assert "weight under the model's own name" in str(report)
    saved = tensors_in(tmp_path / "out")
    assert torch.equal(saved["weight"], weights["kernel"] * 0.5)
    assert torch.equal(saved["bias"], weights["bias"])


@pytest.mark.parametrize("options", [DEEPSPEED3, FSDP2], ids=["deepspeed", "fsdp2"])
def test_dtype_and_trainable_only(options: Options, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Saving casts elements and leaves out frozen parameters."""
    path = checkpoints("mixtral", BF16)
    model = zerostart.load(path, progress=False, **options)
    zerostart.save(model, tmp_path / "wide", dtype=F32)
    source = tensors_in(path)
    cast = tensors_in(tmp_path / "wide")
    assert all(torch.equal(cast[name], tensor.to(F32)) for name, tensor in source.items())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    report = zerostart.save(model, tmp_path / "trained", trainable_only=True)
    assert set(report.tensors) == {name for name in source if "experts" in name}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_shard_size": "many"}, "not a size"),
        ({"dtype": torch.int8}, "floating"),
        ({"adapters_only": True, "merge_adapters": True}, "one of them"),
        ({"adapters_only": True}, "has no adapters"),
        ({"merge_adapters": True}, "has no adapters"),
        ({"memory_limit": 3}, "memory_limit"),
        ({"path": ""}, "pass the path of a directory"),
        ({"path": None}, "saving to None: pass the path of a directory"),
    ],
)
def test_bad_arguments_are_refused(arguments: Options, message: str, tmp_path: Path) -> None:
    """Bad arguments raise an error and leave no files."""
    with pytest.raises(zerostart.errors.ConfigError, match=message):
        zerostart.save(torch.nn.Linear(2, 2), **{"path": tmp_path / "out"} | arguments)
    assert not list(tmp_path.iterdir())


def fill_disk(path: Path, out: Path) -> tuple[str, list[str]]:
    """Save while rank 1 cannot write; return error and files."""
    model = zerostart.load(path, engine="fsdp2", progress=False)
    zerostart.save(model, out)
    before = sorted(p.name for p in out.iterdir())
    if torch.distributed.get_rank() == 1:
        os.pwrite = raise_no_space  # type: ignore[assignment]
    with pytest.raises(zerostart.errors.WriteError) as caught:
        zerostart.save(model, out)
    torch.distributed.barrier()
    assert sorted(p.name for p in out.iterdir()) == before
    return str(caught.value), [p.name for p in out.parent.iterdir()]


def raise_no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rank_that_cannot_write_fails_all(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints("mixtral", BF16)
    (error, files), (other_error, _) = run_ranks(fill_disk, 2, path, tmp_path / "out", timeout=120)
    assert error == other_error
    assert "No space left" in error
    assert files == ["out"]
    assert_same_tensors(tmp_path / "out", path)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A casting save needs less memory than the shard."""
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({f"{n}.weight": torch.randn(4096, 4096) for n in range(4)}, tmp_path / "in/model.safetensors")
    ((peak, shards), _) = run_ranks(measure_save_peak, 2, tmp_path, timeout=240)
    assert peak < 96 << 20 < shards


def measure_save_peak(folder: Path) -> tuple[int, int]:
    from zerostart.transfer import PeakMeter

    def build_wide_model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))

    model = zerostart.load(folder / "in", model=build_wide_model, engine="fsdp2", progress=False)
    zerostart.save(model, folder / "first")  # imports and one-time buffers
    with PeakMeter(torch.device("cpu")) as meter:
        zerostart.save(model, folder / "second", dtype=torch.float64)
    shards: list[Any] = list(model.parameters())
    return meter.host_bytes, sum(p.to_local().nbytes for p in shards)


def test_which_other_files_are_copied(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(checkpoints("mixtral", BF16), source)
    copied = ("tokenizer.json", "merges.txt", "chat_template.jinja", "processing_own.py", "spiece.model")
    ignored = ("trainer_state.json", "training_args.bin", "other.index.json", "adapter_config.json")
    for name in (*copied, *ignored):
        (source / name).write_text(name)
    model = zerostart.load(source, engine="fsdp2", progress=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("the user's")
    zerostart.save(model, tmp_path / "out", dtype=F32)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    written = {"model.safetensors", "config.json", "generation_config.json", "zerostart.json", "notes.txt"}
    assert names == {*copied, *written}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert model.config.dtype == BF16  # type: ignore[union-attr]
