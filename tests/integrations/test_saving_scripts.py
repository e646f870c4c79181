"""Save and resume with the libraries' calls and one added line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.saving_scripts import resume, save_every_way, save_on_one_rank
from tests.integrations.scripts import fsdp2, zero3
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

ENGINES = ("deepspeed", "fsdp2")


def environment_of(engine: str, folder: Path) -> dict[str, str]:
    if engine == "fsdp2":
        return fsdp2()
    more: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    if engine == "zero2":
        more["zero_optimization"] = {"stage": 2}
    return zero3(folder, **more)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(function: Any, ranks: int, *arguments: Any) -> Any:
    results = run_ranks(function, ranks, *arguments, process_group=False, timeout=200)
    assert all(result == results[0] for result in results)
    return results[0]


def unsharded(weights: Path, out: Path) -> None:
    """Save, with plain transformers, the unsharded model that has ``weights``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights)
    model.save_pretrained(out / "whole")
    model.save_pretrained(out / "cut", max_shard_size="100KB")


def settings_in(folder: Path) -> dict[str, Any]:
    """Return all JSON files except the marker, including the index."""
    files = [file for file in folder.glob("*.json") if file.name != "zerostart.json"]
    return {file.name: json.loads(file.read_text()) for file in files}


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_accelerate_saves_and_resumes(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, environment = checkpoints("qwen3_moe_aligned"), environment_of(engine, tmp_path / "zero")
    out = tmp_path / "out"
    _, losses = run(save_every_way, 2, path, out, environment, {})
    # transformers saves the tensors that accelerate gathers: compare with the save of all ranks.
    gathered = tensors_in(out / "documented")
    assert same(tensors_in(out / "main"), gathered)
    unsharded(out / "documented", tmp_path)
    for ours, theirs in (("whole", "whole"), ("cut", "cut"), ("over", "whole")):
        assert same(tensors_in(out / ours), gathered)
        assert settings_in(out / ours) == settings_in(tmp_path / theirs)
        assert {f.name for f in (out / ours).glob("*.safetensors")} == {
            f.name for f in (tmp_path / theirs).glob("*.safetensors")
        }
    check_own_names(path, out / "model", gathered)
    assert run(resume, 2, path, out / "state", environment, {}) == losses


def check_own_names(path: Path, model: Path, gathered: dict[str, torch.Tensor]) -> None:
    """accelerate's ``save_model`` has the model's own names, which ``load_checkpoint_in_model`` takes."""
    from accelerate import load_checkpoint_in_model
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(path)
    load_checkpoint_in_model(whole, str(model), strict=True)
    whole.save_pretrained(model / "again")
    assert same(tensors_in(model / "again"), gathered)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_a_call_on_one_rank_is_an_error(waits: bool, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Raise at once if the others wait for everyone, otherwise after the timeout."""
    arguments = (checkpoints("qwen3"), tmp_path / "out", fsdp2(), waits)
    seconds = run_ranks(save_on_one_rank, 2, *arguments, process_group=False, timeout=100)[0]
    assert seconds < 5 if waits else 19 < seconds < 25


#: Engine and ranks of the save, and of the resumed training.
MOVES = [
    ("deepspeed", 2, "fsdp2", 2),
    ("fsdp2", 2, "deepspeed", 1),
    ("deepspeed", 4, "zero2", 2),
    ("zero2", 2, "fsdp2", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "before", "engine", "after"), MOVES)
def test_another_engine_resumes(
    saved: str, before: int, engine: str, after: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, out = checkpoints("qwen3"), tmp_path / "out"
    _, losses = run(save_every_way, before, path, out, environment_of(saved, tmp_path / "a"), {})
    resumed_losses = run(resume, after, path, out / "state", environment_of(engine, tmp_path / "b"), {})
    assert resumed_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_states_of_accelerate_are_resumed(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, environment, out = checkpoints("qwen3"), environment_of(engine, tmp_path / "zero"), tmp_path / "out"
    _, losses = run(save_every_way, 2, path, out, environment, None)
    assert run(resume, 2, path, out / "state", environment, {}) == pytest.approx(losses, rel=1e-5)
