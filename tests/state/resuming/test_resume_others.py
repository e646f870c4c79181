"""Resuming from what DeepSpeed, torch and accelerate saved: the losses are those of their own run."""

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


def _save_as_they_do(run: Run, out: Path) -> None:
    if run.case.engine == "deepspeed":
        run.model.save_checkpoint(str(out))
        return
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=out)


def _save_by_accelerate(run: Run, out: Path) -> None:
    """The form of accelerate's ``save_state``: weights and optimizer in folders of their own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights}, checkpoint_id=out / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=out / "optimizer_0")


HOW = {"accelerate": _save_by_accelerate}


def uninterrupted(path: Path, cases: dict[str, Case], folder: Path, how: str) -> dict[str, list[float]]:
    """The losses of runs that others save in the middle."""
    out = {}
    for name, case in cases.items():
        run = Run(path, case)
        for number in range(FIRST):
            run.step(number)
        HOW.get(how, _save_as_they_do)(run, folder / name)
        out[name] = [loss for number in range(FIRST, FIRST + MORE) for loss in run.step(number)]
        run.end()
    return out


def resumed(path: Path, case: Case, source: Path | str) -> list[float]:
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
def test_deepspeeds_own_checkpoint_goes_on(path: Path, tmp_path: Path, name: str) -> None:
    case = STOCK[name]
    wanted = run_ranks(uninterrupted, 2, path, {name: case}, tmp_path / "runs", "")[0][name]
    own = {**case.__dict__, "stock": False}
    assert run_ranks(resumed, 2, path, Case(**own), tmp_path / "runs" / name)[0] == wanted
    if not case.bf16:
        for engine, stage, world in (("fsdp2", 3, 1), ("deepspeed", 3, 3)):
            other: dict[str, Any] = {**own, "engine": engine, "stage": stage}
            found = run_ranks(resumed, world, path, Case(**other), tmp_path / "runs" / name)[0]
            assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_stage_3_goes_on(path: Path, tmp_path: Path) -> None:
    # Saved by DeepSpeed of a model that zerostart has loaded: stock's own loading of a model whole would be
    # sharded by its `zero.Init`, which gives the same file.
    case = Case("deepspeed", 3, {"sub_group_size": 500}, bf16=True, groups="two")
    wanted = run_ranks(uninterrupted, 2, path, {"zero3": case}, tmp_path / "runs", "")[0]["zero3"]
    assert run_ranks(resumed, 2, path, case, tmp_path / "runs" / "zero3")[0] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "accelerate"])
def test_torchs_and_accelerates_own_checkpoints_go_on(path: Path, tmp_path: Path, how: str) -> None:
    case = Case("fsdp2", groups="two", stock=True)
    wanted = run_ranks(uninterrupted, 2, path, {"run": case}, tmp_path / "runs", how)[0]["run"]
    own = Case("fsdp2", groups="two")
    assert run_ranks(resumed, 2, path, own, tmp_path / "runs" / "run")[0] == wanted
    other = Case("deepspeed", 2, groups="turned", top=UNCLIPPED)
    found = run_ranks(resumed, 3, path, other, tmp_path / "runs" / "run")[0]
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_goes_on(path: Path, tmp_path: Path, stage: int) -> None:
    case = Case("deepspeed", stage, groups="two", top=UNCLIPPED)
    wanted = run_ranks(uninterrupted, 2, path, {"run": case}, tmp_path / "runs", "")[0]["run"]
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
    assert run_ranks(resumed, 2, path, case, tmp_path / "universal")[0] == wanted
    other = Case("fsdp2", groups="turned")
    assert run_ranks(resumed, 3, path, other, tmp_path / "universal")[0] == pytest.approx(wanted, rel=1e-5)
