"""Resume from checkpoints of DeepSpeed, torch and accelerate."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.state.resuming.trainings import Case, Run

FIRST, MORE = 2, 3


def _save_by_engine(run: Run, out: Path) -> None:
    if run.case.engine == "deepspeed":
        run.model.save_checkpoint(str(out))
        return
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=out)


def _save_by_accelerate(run: Run, out: Path) -> None:
    """Write accelerate's format: weights and optimizer in separate folders."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights}, checkpoint_id=out / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=out / "optimizer_0")


SAVERS = {"accelerate": _save_by_accelerate}


def train_and_save(path: Path, cases: dict[str, Case], folder: Path, saver: str) -> dict[str, list[float]]:
    """Save with the other library, and return the further losses."""
    losses = {}
    for name, case in cases.items():
        run = Run(path, case)
        for number in range(FIRST):
            run.step(number)
        SAVERS.get(saver, _save_by_engine)(run, folder / name)
        losses[name] = [loss for number in range(FIRST, FIRST + MORE) for loss in run.step(number)]
        run.end()
    return losses


def resume(path: Path, case: Case, source: Path | str) -> list[float]:
    run = Run(path, case)
    assert zerostart.load_state(source, *run.state) is None
    losses = [loss for number in range(FIRST, FIRST + MORE) for loss in run.step(number)]
    run.end()
    return losses


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint("qwen3", tmp_path)


#: DeepSpeed clips by default, and FSDP2 does not.
UNCLIPPED = {"gradient_clipping": 0.0}
STOCK: dict[str, Case] = {
    "zero2": Case("deepspeed", 2, groups="two", stock=True, top=UNCLIPPED),
    "zero1": Case("deepspeed", 1, bf16=True, groups="frozen", stock=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOCK)
def test_deepspeed_checkpoint_resumes(path: Path, tmp_path: Path, name: str) -> None:
    case = STOCK[name]
    expected = run_ranks(train_and_save, 2, path, {name: case}, tmp_path / "runs", "")[0][name]
    fields = {**case.__dict__, "stock": False}
    assert run_ranks(resume, 2, path, Case(**fields), tmp_path / "runs" / name)[0] == expected
    if not case.bf16:
        for engine, stage, size in (("fsdp2", 3, 1), ("deepspeed", 3, 3)):
            other_fields: dict[str, Any] = {**fields, "engine": engine, "stage": stage}
            actual = run_ranks(resume, size, path, Case(**other_fields), tmp_path / "runs" / name)[0]
            assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_stage_3_resumes(path: Path, tmp_path: Path) -> None:
    # zerostart loads the model that DeepSpeed saves: `zero.Init` on a stock load gives the same files.
    case = Case("deepspeed", 3, {"sub_group_size": 500}, bf16=True, groups="two")
    expected = run_ranks(train_and_save, 2, path, {"zero3": case}, tmp_path / "runs", "")[0]["zero3"]
    assert run_ranks(resume, 2, path, case, tmp_path / "runs" / "zero3")[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["torch", "accelerate"])
def test_torch_and_accelerate_checkpoints_resume(path: Path, tmp_path: Path, saver: str) -> None:
    case = Case("fsdp2", groups="two", stock=True)
    expected = run_ranks(train_and_save, 2, path, {"run": case}, tmp_path / "runs", saver)[0]["run"]
    loaded = Case("fsdp2", groups="two")
    assert run_ranks(resume, 2, path, loaded, tmp_path / "runs" / "run")[0] == expected
    deepspeed = Case("deepspeed", 2, groups="reversed", top=UNCLIPPED)
    actual = run_ranks(resume, 3, path, deepspeed, tmp_path / "runs" / "run")[0]
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoint_resumes(path: Path, tmp_path: Path, stage: int) -> None:
    case = Case("deepspeed", stage, groups="two", top=UNCLIPPED)
    expected = run_ranks(train_and_save, 2, path, {"run": case}, tmp_path / "runs", "")[0]["run"]
    folder = tmp_path / "runs" / "run"
    subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(folder / (folder / "latest").read_text())),
            *("--output_folder", str(tmp_path / "universal")),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert run_ranks(resume, 2, path, case, tmp_path / "universal")[0] == expected
    fsdp2 = Case("fsdp2", groups="reversed")
    assert run_ranks(resume, 3, path, fsdp2, tmp_path / "universal")[0] == pytest.approx(expected, rel=1e-5)
