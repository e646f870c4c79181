"""Markers and pickles of training states that somebody has made up: refused, soon, nothing else touched."""

import contextlib
import json
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zerostart.checkpoint.formats.inert_pickle import read_inert_pickle
from zerostart.checkpoint.formats.training import training_states
from zerostart.checkpoint.write.staging import Staging
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


_MANY = 100_000
#: A class, remembered as 0.
_CLASS = b"\x80\x02cany\nclass\nq\x00"


def _nested(within: bytes, before: bytes = b"N") -> bytes:
    return before + within * _MANY


@pytest.mark.parametrize(
    "raw",
    [
        _doubled_tuples(200),
        b"\x80\x02}" + _nested(b"\x85") + b"Ns.",
        b"\x80\x02}(" + _nested(b"\x85") + b"Nu.",
        _CLASS + b")}" + _nested(b"\x85") + b"Ns\x92.",
        b"\x80\x02}("
        + b"".join(b"\x8a\xff%bN" % ((n << 61) - n).to_bytes(255, "little") for n in range(_MANY))
        + b"u.",
        b"\x80\x02J\xff\xff\xff\xffq\x00J\xfe\xff\xff\xffq\x0100}("
        + b"".join(b"(%btN" % b"".join(b"h%c" % (n >> bit & 1) for bit in range(16)) for n in range(1 << 16))
        + b"u.",
        b"\x80\x02\x8b" + struct.pack("<i", -6) + b".",  # which would begin again for ever
        b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 36) + b"a.",
        b"\x80\x04\x8d" + struct.pack("<Q", (1 << 64) - 1) + b"a.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b".",
        _CLASS + b"(" + b"N" * 20_000 + b"tq\x01" + b"h\x00h\x01\x81" * 20_000 + b".",
        _CLASS + b"(" + b"N" * 20_000 + b"tq\x01" + b"h\x00h\x01R" * 20_000 + b".",
        b"\x80\x02" + b"".join(b"ca\n%d\n" % n for n in range(_MANY)) + b".",
        b"\x80\x02X" + struct.pack("<L", 1 << 20) + b"a" * (1 << 20) + b"q\x00(" + b"h\x00" * _MANY + b"t.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor\nN}X\x08\0\0\0__code__Ns\x86b.",
        _CLASS + b"N}X\x04\0\0\0nameNs\x86b.",
    ],
    ids=[
        "tuples in tuples",
        "a tuple for a key",
        "keys",
        "a keyword",
        "integers of one hash",
        "tuples of one hash",
        "an integer of less than nothing",
        "an integer of a million bytes",
        "bytes that are not there",
        "a text that is not there",
        "an array that is not there",
        "arguments",
        "arguments of calls",
        "names",
        "a text over and over",
        "attributes of a call",
        "attributes of a class",
    ],
)
def test_a_pickle_takes_no_time_and_no_memory_for_nothing(raw: bytes) -> None:
    begun = time.process_time()
    with _little_memory(), pytest.raises(CheckpointError, match=r"states\.pt"):
        read_inert_pickle(raw, "states.pt")
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "raw",
    [_nested(b"\x85"), _nested(b"]", b"") + b"a" * (_MANY - 1), _nested(b"}N", b"") + b"}" + b"s" * _MANY],
    ids=["tuples", "lists", "dictionaries"],
)
def test_what_is_deep_is_read(raw: bytes) -> None:
    with _little_memory():
        assert read_inert_pickle(b"\x80\x02Nr\xff\xff\xff\x7f.", "states.pt") is None  # a memo of 2 G
        read_inert_pickle(b"\x80\x02" + raw + b".", "states.pt")
        read_inert_pickle(_CLASS + _nested(b"h\x00)\x81", b"") + b"b" * (_MANY - 1) + b".", "states.pt")


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """A quarter of a gigabyte at most beside what the process has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
    with pytest.raises(CheckpointError, match="files of two jobs, or of two moments, are mixed"):
        training_states(tmp_path)
    _zero_rank(tmp_path, 1, first)
    found = training_states(tmp_path)
    assert found is not None
    assert set(found[2].weights) == {f"optimizer/{key}/weight" for key in first}
