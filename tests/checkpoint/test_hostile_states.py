"""Markers and pickles of training states that somebody has made up: refused, soon, nothing else touched."""

from __future__ import annotations

import json
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from zerostart.checkpoint.formats.inert_pickle import read_inert_pickle
from zerostart.checkpoint.publishing import Staging
from zerostart.checkpoint.training import training_states
from zerostart.errors import CheckpointError


def test_a_marker_does_not_make_a_save_remove_what_lies_elsewhere(
    tmp_path: Path,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for name in ("above.txt", "absolute.txt", "place/old.txt"):
        (tmp_path / name).write_text("kept")
    names = ["../above.txt", str(tmp_path / "absolute.txt"), "a/../../above.txt", "old.txt"]
    (place / "zerostart.json").write_text(json.dumps({"format": 1, "files": {name: {} for name in names}}))
    staging = Staging(place)
    (staging.directory / "new.txt").write_text("new")
    staging.complete({})
    assert (tmp_path / "above.txt").read_text() == (tmp_path / "absolute.txt").read_text() == "kept"
    assert sorted(p.name for p in place.iterdir()) == ["new.txt", "old.txt", "zerostart.json"]


def _doubled_tuples(depth: int) -> bytes:
    """A dictionary whose key is a tuple of two tuples of two tuples..., each of them one object."""
    return b"\x80\x02}" + b")" + b"2\x86" * depth + b"Ns."


@pytest.mark.parametrize(
    "raw",
    [
        _doubled_tuples(200),
        b"\x80\x02\x8b" + struct.pack("<i", -6) + b".",  # which would begin again for ever
        b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    ],
    ids=["tuples in tuples", "an integer of less than nothing", "an integer of a million bytes"],
)
def test_a_pickle_takes_no_time_for_nothing(raw: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(CheckpointError):
        read_inert_pickle(raw, "states.pt")
    assert time.process_time() - begun < 5


def test_tuples_of_names_and_numbers_are_keys() -> None:
    value: Any = {("a", 1): 2, (): 3}
    assert read_inert_pickle(pickle.dumps(value, protocol=2), "states.pt") == value


def _zero_rank(folder: Path, rank: int, moments: tuple[str, ...]) -> None:
    state = {0: {key: torch.zeros(2) for key in moments}}
    torch.save(
        {
            "optimizer_state_dict": {
                "zero_stage": 2,
                "partition_count": 2,
                "single_partition_of_fp32_groups": [torch.zeros(2)],
                "base_optimizer_state": {"state": state, "param_groups": [{"params": [0]}]},
            }
        },
        folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    )


@pytest.mark.parametrize("first", [("exp_avg", "exp_avg_sq"), ("exp_avg",), ()])
def test_ranks_of_deepspeeds_with_other_states_are_of_two_jobs(
    tmp_path: Path, first: tuple[str, ...]
) -> None:
    _zero_rank(tmp_path, 0, first)
    _zero_rank(tmp_path, 1, ("exp_avg_sq", "other"))
    torch.save(
        {"module": {}, "param_shapes": [{"weight": torch.Size([4])}]}, tmp_path / "mp_rank_00_model_states.pt"
    )
    with pytest.raises(CheckpointError, match="those of two jobs, or of two moments, are mixed"):
        training_states(tmp_path)
    _zero_rank(tmp_path, 1, first)
    found = training_states(tmp_path)
    assert found is not None
    assert set(found[2].weights) == {f"optimizer/{key}/weight" for key in first}
