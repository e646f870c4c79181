"""Save and resume the HF Trainer's checkpoints with zerostart's line."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.scripts import Data, fsdp2, zero3
from tests.integrations.test_saving_scripts import same, settings_in, tensors_in
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

ENGINES = ("deepspeed", "fsdp2")


def environment_of(engine: str, folder: Path) -> dict[str, str]:
    if engine == "fsdp2":
        return fsdp2(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")
    # Without stage3_gather_16bit_weights_on_model_save: nothing is gathered.
    return zero3(folder, zero_optimization={"stage": 2 if engine == "zero2" else 3})


def script(
    path: Path,
    out: Path,
    environment: dict[str, str],
    resume: bool | str,
    more: dict[str, Any],
) -> dict[str, Any]:
    """Train like transformers' examples; return the log and the gathered weights."""
    os.environ.update(environment)
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import zerostart

    zerostart.enable()
    ranks = int(os.environ["WORLD_SIZE"])
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4 // ranks,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "use_cpu": "FSDP_VERSION" in environment,
        "ddp_backend": "gloo",
        **more,
    }
    args = TrainingArguments(output_dir=str(out), **arguments)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    trainer = Trainer(model=model, args=args, train_dataset=Data(), eval_dataset=Data())
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    return {
        "losses": {entry["step"]: entry["loss"] for entry in logs if "loss" in entry},
        "evaluated": [entry["eval_loss"] for entry in logs if "eval_loss" in entry],
        "best": trainer.state.best_model_checkpoint,
        "weights": {n: t.clone() for n, t in zerostart.full_tensors(model, None)},
        "again": trainer.evaluate()["eval_loss"] if more.get("load_best_model_at_end") else None,
    }


def run(ranks: int, *arguments: Any, resume: bool | str = False, **more: Any) -> Any:
    results = run_ranks(script, ranks, *arguments, resume, more, process_group=False, timeout=200)
    return results[0]


def test_the_last_checkpoint_is_a_complete_one(tmp_path: Path) -> None:
    from transformers import trainer

    import zerostart

    for number in (2, 10, 20, 30):
        (tmp_path / f"checkpoint-{number}").mkdir()
    stock = trainer.get_last_checkpoint
    with zerostart.enabled():
        assert trainer.get_last_checkpoint(str(tmp_path)) is None
        for number, text in ((2, "{}"), (10, '{"epoch": 1.0}'), (20, '{"epo')):
            (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(text)
        assert trainer.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert trainer.get_last_checkpoint is stock
    assert stock(str(tmp_path)) == str(tmp_path / "checkpoint-30")


@pytest.mark.parametrize("engine", [pytest.param("deepspeed", marks=pytest.mark.slow), "fsdp2"])
def test_checkpoints_are_models_and_resume(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, out = checkpoints("qwen3_moe_aligned"), tmp_path / "out"
    environment = environment_of(engine, tmp_path / "zero")
    straight = run(2, path, out, environment)
    assert straight["losses"].keys() == {1, 2, 3, 4}
    whole = AutoModelForCausalLM.from_pretrained(out / "checkpoint-4")
    assert same(dict(whole.state_dict()), straight["weights"])
    # Files, names and settings are those of transformers.
    whole.save_pretrained(tmp_path / "again")
    assert same(tensors_in(out / "checkpoint-4"), tensors_in(tmp_path / "again"))
    expected = settings_in(tmp_path / "again")
    settings = settings_in(out / "checkpoint-4")
    assert settings.pop("trainer_state.json")
    assert settings == expected
    resumed = run(2, path, out, environment, resume=str(out / "checkpoint-2"))
    assert {step: resumed["losses"][step] for step in (3, 4)} == {
        step: straight["losses"][step] for step in (3, 4)
    }
    assert same(resumed["weights"], straight["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", [*ENGINES, "zero2"])
def test_the_best_checkpoint_is_kept_and_the_last_resumed(
    engine: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, out = checkpoints("qwen3"), tmp_path / "out"
    more: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    # The loss falls: with the greatest loss as best, the first checkpoint is best.
    more |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    result = run(2, path, out, environment_of(engine, tmp_path / "a"), max_steps=6, **more)
    assert result["best"] == str(out / "checkpoint-2")
    assert result["again"] == pytest.approx(max(result["evaluated"]), rel=1e-6)
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == ["checkpoint-2", "checkpoint-6"]
    resumed = run(2, path, out, environment_of(engine, tmp_path / "a"), resume=True, max_steps=8)
    assert resumed["losses"].keys() >= {7, 8}


MOVES = [("deepspeed", 2, "fsdp2", 1), ("fsdp2", 2, "deepspeed", 1), ("zero2", 1, "deepspeed", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "before", "second", "after"), MOVES)
def test_another_engine_resumes(
    first: str, before: int, second: str, after: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Train on 4 sequences a step everywhere."""
    path, out = checkpoints("qwen3"), tmp_path / "out"
    straight = run(before, path, out, environment_of(first, tmp_path / "a"))
    checkpoint = str(out / "checkpoint-2")
    (state,) = (out / "checkpoint-2").glob("*/model/model.safetensors")
    assert state.read_bytes() == (out / "checkpoint-2" / "model.safetensors").read_bytes()
    resumed = run(after, path, tmp_path / "b", environment_of(second, tmp_path / "b"), resume=checkpoint)
    for step in (3, 4):
        assert resumed["losses"][step] == pytest.approx(straight["losses"][step], abs=2e-4)
