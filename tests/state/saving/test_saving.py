"""A sharded model goes back to disk as it came: names, types, shapes and every byte of every tensor."""

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

#: Checkpoint, its dtype, options of the load; by the number of ranks.
ROUND_TRIPS: dict[int, dict[str, tuple[str, torch.dtype, Options]]] = {
    1: {
        "qwen3_moe": ("qwen3_moe", BF16, FSDP2),
    },
    2: {
        "tied, zero3": ("qwen3", F32, DEEPSPEED3),
        "tied, zero2": ("qwen3", BF16, DEEPSPEED2),
        "experts, fsdp2, shared out": ("qwen3_moe", BF16, {**FSDP2, "expert_parallel": 2}),
        "gpt_oss": ("gpt_oss", BF16, FSDP2),
    },
    4: {
        "tied, replicas": ("qwen3", BF16, {**FSDP2, "zero_stage": 0}),
        "tied, tensors": ("qwen3_even", BF16, {**FSDP2, "tensor_parallel": 2}),
        "experts, fsdp2": ("qwen3_moe", F32, FSDP2),
        "experts, zero2, shared out": ("mixtral", BF16, {**DEEPSPEED2, "expert_parallel": 2}),
        "experts, zero3, shared out": ("mixtral", BF16, {**DEEPSPEED3, "expert_parallel": 2}),
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
    """All tensors of the safetensors files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def assert_same_tensors(got: Path, want: Path) -> None:
    """Names, types, shapes and bits of all tensors in two folders."""
    found, expected = tensors_in(got), tensors_in(want)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = found[name].reshape(-1).view(torch.uint8)
        assert torch.equal(bits, tensor.reshape(-1).view(torch.uint8)), name


def _save_all(tasks: dict[str, tuple[Path, Options]], out: Path) -> dict[str, str]:
    """On one rank: load and save everything; errors by task."""
    failed = {}
    for name, (path, options) in tasks.items():
        try:
            model = zerostart.load(path, progress=False, **options)
            report = zerostart.save(model, out / name, max_shard_size="20KB")
            assert not report.own_names, report.own_names
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_round_trip(size: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """What was loaded in shards is saved as it was, and plain transformers opens it."""
    from transformers import AutoModelForCausalLM

    tasks = {n: (checkpoints(kind, dtype), o) for n, (kind, dtype, o) in ROUND_TRIPS[size].items()}
    assert run_ranks(_save_all, size, tasks, tmp_path, timeout=300) == [{}] * size
    for name, (path, _) in tasks.items():
        assert_same_tensors(tmp_path / name, path)
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        reference = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        assert opened.config.to_diff_dict() == reference.config.to_diff_dict()
        theirs = reference.state_dict()
        for key, tensor in opened.state_dict().items():
            assert torch.equal(tensor, theirs[key]), f"{name}: {key}"


def _plain_stack() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))


def _turned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A converter that transposes, splits and renames."""
    first, last = state["both"].split([10, 3])
    rest = {name: tensor for name, tensor in state.items() if name not in ("both", "kernel")}
    return {"0.weight": state["kernel"].t().contiguous(), "0.bias": first, "2.bias": last, **rest}


def test_plain_module_through_a_converter(tmp_path: Path) -> None:
    """A module of nobody's library, loaded through a callable: buffers, transposes and parts go back."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    state = {name: tensor.clone() for name, tensor in _plain_stack().state_dict().items()}
    state["1.running_mean"] = torch.randn(10)
    state["kernel"] = state.pop("0.weight").t().contiguous()
    state["both"] = torch.cat([state.pop("0.bias"), state.pop("2.bias")])
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    model = zerostart.load(tmp_path / "in", model=_plain_stack, converter=_turned, engine="fsdp2")
    report = zerostart.save(model, tmp_path / "out")
    assert report.own_names == {}
    assert report.written_bytes == report.total_bytes == sum(t.nbytes for t in state.values())
    assert_same_tensors(tmp_path / "out", tmp_path / "in")


def test_what_cannot_be_put_back_has_its_own_name(tmp_path: Path) -> None:
    """A value that was calculated is saved under the model's name, which the report tells."""
    from safetensors.torch import save_file

    def halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": state["kernel"] * 0.5, "bias": state["bias"]}

    (tmp_path / "in").mkdir()
    weights = {"kernel": torch.randn(4, 3), "bias": torch.randn(4)}
    save_file(weights, tmp_path / "in" / "model.safetensors")
    model = zerostart.load(
        tmp_path / "in", model=lambda: torch.nn.Linear(3, 4), converter=halved, engine="fsdp2"
    )
    report = zerostart.save(model, tmp_path / "out")
    assert set(report.own_names) == {"weight"}
    assert "calculated" in report.own_names["weight"]
    assert "weight under the model's own name" in str(report)
    found = tensors_in(tmp_path / "out")
    assert torch.equal(found["weight"], weights["kernel"] * 0.5)
    assert torch.equal(found["bias"], weights["bias"])


@pytest.mark.parametrize("options", [DEEPSPEED3, FSDP2], ids=["deepspeed", "fsdp2"])
def test_dtype_and_trainable_only(options: Options, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Elements are cast on the way, and frozen ones stay out."""
    path = checkpoints("mixtral", BF16)
    model = zerostart.load(path, progress=False, **options)
    zerostart.save(model, tmp_path / "wide", dtype=F32)
    want = tensors_in(path)
    found = tensors_in(tmp_path / "wide")
    assert all(torch.equal(found[name], tensor.to(F32)) for name, tensor in want.items())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    report = zerostart.save(model, tmp_path / "trained", trainable_only=True)
    assert set(report.tensors) == {name for name in want if "experts" in name}


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
def test_refused(arguments: Options, message: str, tmp_path: Path) -> None:
    """Arguments that no save can serve are an error, and leave nothing."""
    with pytest.raises(zerostart.errors.ConfigError, match=message):
        zerostart.save(torch.nn.Linear(2, 2), **{"path": tmp_path / "out"} | arguments)
    assert not list(tmp_path.iterdir())


def _fail_on_one(path: Path, out: Path) -> tuple[str, list[str]]:
    """On one rank: a save in which rank 1 cannot write; the error, and what is left."""
    model = zerostart.load(path, engine="fsdp2", progress=False)
    zerostart.save(model, out)
    before = sorted(p.name for p in out.iterdir())
    if torch.distributed.get_rank() == 1:
        os.pwrite = _no_space  # type: ignore[assignment]
    with pytest.raises(zerostart.errors.WriteError) as caught:
        zerostart.save(model, out)
    torch.distributed.barrier()
    assert sorted(p.name for p in out.iterdir()) == before
    return str(caught.value), [p.name for p in out.parent.iterdir()]


def _no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rank_that_cannot_write_fails_all(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """All ranks raise the same named error; what was saved before is as it was, and nothing else is left."""
    path = checkpoints("mixtral", BF16)
    (one, left), (other, _) = run_ranks(_fail_on_one, 2, path, tmp_path / "out", timeout=120)
    assert one == other
    assert "No space left" in one
    assert left == ["out"]
    assert_same_tensors(tmp_path / "out", path)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """Nothing like a shard is made beside the shard, whatever is cast on the way."""
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({f"{n}.weight": torch.randn(4096, 4096) for n in range(4)}, tmp_path / "in/model.safetensors")
    ((peak, shards), _) = run_ranks(_peak_of_wide, 2, tmp_path, timeout=240)
    assert peak < 96 << 20 < shards


def _peak_of_wide(folder: Path) -> tuple[int, int]:
    from zerostart.transfer import PeakMeter

    def wide() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))

    model = zerostart.load(folder / "in", model=wide, engine="fsdp2", progress=False)
    zerostart.save(model, folder / "first")  # what is imported and made once
    with PeakMeter(torch.device("cpu")) as meter:
        zerostart.save(model, folder / "second", dtype=torch.float64)
    shards: list[Any] = list(model.parameters())
    return meter.host_bytes, sum(p.to_local().nbytes for p in shards)


def test_what_lies_beside_the_weights(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Tokenizer, template and code files are copied; what describes other weights or a run is not."""
    source = tmp_path / "in"
    shutil.copytree(checkpoints("mixtral", BF16), source)
    copied = ("tokenizer.json", "merges.txt", "chat_template.jinja", "processing_own.py", "spiece.model")
    left = ("trainer_state.json", "training_args.bin", "other.index.json", "adapter_config.json")
    for name in (*copied, *left):
        (source / name).write_text(name)
    model = zerostart.load(source, engine="fsdp2", progress=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("of the user")
    zerostart.save(model, tmp_path / "out", dtype=F32)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    own = {"model.safetensors", "config.json", "generation_config.json", "zerostart.json", "notes.txt"}
    assert names == {*copied, *own}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert model.config.dtype == BF16  # type: ignore[union-attr]
