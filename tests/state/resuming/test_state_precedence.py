"""A zerostart state precedes another library's checkpoint."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.state.resuming.trainings import Case, Run
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError


def make_pair(value: float) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters(), lr=value, momentum=0.5)


def save_dcp(path: Path, value: float) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(*make_pair(value))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("subfolder", ["", "pytorch_model_fsdp_0"])
def test_state_precedes_torchs(tmp_path: Path, caplog: pytest.LogCaptureFixture, subfolder: str) -> None:
    folder = tmp_path / "run"
    save_dcp(folder / subfolder, 1.0)
    zerostart.save_state(folder / subfolder, *make_pair(2.0), extra="ours")
    for age in ("older", "newer"):
        if age == "newer":
            save_dcp(folder / subfolder, 3.0)
            os.utime(folder / subfolder / "state.json", (1, 1))
        for _ in range(2):
            model, optimizer = make_pair(0.0)
            assert zerostart.load_state(folder, model, optimizer) == "ours"
            assert (model.weight == 2.0).all()
            assert optimizer.param_groups[0]["lr"] == 2.0
        loaded: Any = zerostart.load(
            folder, lambda: torch.nn.Linear(2, 2), engine="fsdp2", zero_stage=0, progress=False
        )
        assert (loaded.weight == 2.0).all()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if "another library" in text and str(folder) in text]) == 1
    (folder / subfolder / "state.json").unlink()
    model, optimizer = make_pair(0.0)
    assert zerostart.load_state(folder, model, optimizer) is None
    assert (model.weight == 3.0).all()


def test_last_saved_state_is_loaded(tmp_path: Path) -> None:
    for number, name in enumerate(("pytorch_model_fsdp_0", "pytorch_model")):
        zerostart.save_state(tmp_path / name, *make_pair(2.0), extra=name)
        os.utime(tmp_path / name / "state.json", (9 - number, 9 - number))  # copying may change the order
    assert zerostart.load_state(tmp_path, *make_pair(0.0)) == "pytorch_model"


def mix_with_deepspeed(path: Path, folder: Path) -> tuple[float, float, float, Any]:
    """Save with DeepSpeed and later with zerostart; return losses."""
    run = Run(path, Case("deepspeed", 2, stock=True, top={"gradient_clipping": 0.0}))
    run.step(0)
    run.model.save_checkpoint(str(folder))
    run.step(1)
    zerostart.save_state(folder, *run.state, extra={"client_state": {"by": "ours"}})
    expected = run.step(2)[0]
    with zerostart.enabled():
        loaded_path, client = run.model.load_checkpoint(str(folder))
    assert loaded_path == str(folder)
    resumed = run.step(2)[0]
    run.step(3)
    zerostart.load_state(folder, *run.state)
    again = run.step(2)[0]
    # An explicit tag selects DeepSpeed's checkpoint.
    with zerostart.enabled():
        tag, _ = run.model.load_checkpoint(str(folder), tag="global_step1")
    assert "global_step1" in tag
    zerostart.load_state(folder / "global_step1", *run.state)
    assert run.model.global_steps == 1
    run.end()
    return expected, resumed, again, client


@pytest.mark.slow
def test_state_precedes_deepspeeds(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path)
    expected, resumed, again, client = run_ranks(mix_with_deepspeed, 2, path, tmp_path / "run")[0]
    assert resumed == expected
    assert again == expected
    assert client == {"by": "ours"}


def save_two_steps(path: Path, folder: Path, stage: int) -> None:
    run = Run(path, Case("deepspeed", stage, top={"gradient_clipping": 0.0}))
    for number in range(2):
        run.step(number)
        run.model.save_checkpoint(str(folder / str(number)), tag="tag")
    run.end()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind"), [(2, "optim"), (3, "optim"), (3, "model")])
def test_files_of_two_saves_are_refused(tmp_path: Path, stage: int, kind: str) -> None:
    run_ranks(save_two_steps, 2, checkpoint("qwen3", tmp_path), tmp_path, stage)
    (newer,) = (tmp_path / "1" / "tag").glob(f"*zero_pp_rank_1_mp_rank_00_{kind}_states.pt")
    newer.rename(tmp_path / "0" / "tag" / newer.name)
    with pytest.raises(CheckpointError, match=r"rank_1_.*two moments,? are mixed"):
        open_catalog(tmp_path / "0")
