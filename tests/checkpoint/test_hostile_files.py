"""Files from strangers: what is damaged or made up is refused soon, by name, and is never weights."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.catalog import Assembled
from zerostart.checkpoint.formats.training import check_whole, training_states
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError, ReadError, ZerostartError
from zerostart.geometry import Piece

#: Seconds of the processor, which other work on the machine does not lengthen, that a refusal takes at most.
SOON = 10


def soon(action: Callable[[], Any], message: str, kind: type[ZerostartError] = CheckpointError) -> str:
    begun = time.process_time()
    with pytest.raises(kind, match=message) as refused:
        action()
    assert time.process_time() - begun < SOON
    assert len(str(refused.value)) < 2000
    return str(refused.value)


def zero3(folder: Path, lengths: tuple[int, ...], **model: Any) -> Path:
    """A directory of ZeRO-3, whose ranks have as many elements of one weight."""
    shapes: Any = [{"weight": torch.Size([4, 2])}]
    for rank, length in enumerate(lengths):
        states = {
            "zero_stage": 3,
            "partition_count": len(lengths),
            "fp32_flat_groups": [torch.ones(length)],
            "base_optimizer_state": {"state": {}, "param_groups": []},
        }
        torch.save(
            {"optimizer_state_dict": states}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
        torch.save(
            {"module": {}, "param_shapes": shapes, **model},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
    return folder


def test_ranks_of_unequal_lengths_are_no_weights(tmp_path: Path) -> None:
    """Beyond the end of the shorter one lies memory that nothing wrote."""
    assert open_catalog(zero3(tmp_path, (4, 4))).weights["weight"].shape == (4, 2)
    for lengths in ((4, 2), (2, 4), (8, 4)):
        zero3(tmp_path, lengths)
        assert "rank_1" in soon(lambda: open_catalog(tmp_path), "all ranks' must be equal")


RUN = (((8, 1),),)


def piece(origin: tuple[int, ...], axes: Any, offset: int = 0, unit: int = 8) -> Piece:
    return Piece(origin, axes, ("row",), unit, offset)


@pytest.mark.parametrize(
    ("shape", "pieces", "message"),
    [
        ((8,), (piece((0,), RUN),), ""),
        ((4, 2), (piece((0, 0), (((4, 2),), ((2, 1),))),), ""),
        ((9,), (piece((0,), RUN),), "has 9 elements, but the files hold 8"),
        ((7,), (piece((0,), RUN),), "lies outside that shape"),
        ((8,), (piece((0,), (((4, 1),),)), piece((2,), (((4, 1),),))), "fill the same elements"),
        ((8,), (piece((4,), (((4, 1),),)), piece((0,), (((4, 1),),), 4)), ""),
    ],
)
def test_pieces_lie_inside_and_tile(shape: tuple[int, ...], pieces: tuple[Piece, ...], message: str) -> None:
    assembled = {"made": Assembled("made", "F32", shape, pieces)}
    if not message:
        check_whole(assembled)
        return
    with pytest.raises(CheckpointError, match=message):
        check_whole(assembled)


def test_a_destination_that_no_read_fills_is_an_error(tmp_path: Path) -> None:
    from zerostart.geometry.layout import replicated
    from zerostart.recipe import Recipe, Target
    from zerostart.transfer.planning import Destination, join

    save_file({"row": torch.ones(8)}, tmp_path / "model.safetensors")
    target = Target("row", (9,), torch.float32)
    to = Destination("row", 9, 9, torch.float32, True)
    with pytest.raises(ZerostartError, match="row: the checkpoint holds only 8 of the 9 elements"):
        join(open_catalog(tmp_path), [(Recipe(target, (piece((0,), RUN),)), replicated((9,)), to)])


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "zero":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    soon(lambda: open_catalog(tmp_path), "not a regular file")


def sparse(path: Path, length: int = 1 << 32) -> None:
    with path.open("wb") as file:
        file.truncate(length)


@pytest.mark.parametrize("name", [".metadata", "latest", "config.json", "model.safetensors.index.json"])
def test_files_of_nothing_but_their_length(tmp_path: Path, name: str) -> None:
    sparse(tmp_path / name)
    if name == "config.json":
        from zerostart.checkpoint.source import read_config

        soon(lambda: read_config(tmp_path), "beyond the limit")
    else:
        soon(lambda: open_catalog(tmp_path), "beyond the limit|is not a pickle")


def header(tmp_path: Path, text: bytes, data: int = 0) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head><body>" + b" " * 1000 + b"</body></html>"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "kind", "remedy"),
    [
        (POINTER, "a git-lfs pointer", "git lfs pull"),
        (PAGE, "a web page", "download it again"),
        (b"GGUF\3\0\0\0" + bytes(64), "a GGUF file", "take the repository with the safetensors"),
        (b"\x1f\x8b\x08\0" + bytes(64), "compressed", "unpack"),
        (bytes(4096), "nothing but zeros", "download it again"),
    ],
    ids=["pointer", "page", "gguf", "gzip", "zeros"],
)
def test_other_files_are_called_what_they_are(
    tmp_path: Path, name: str, content: bytes, kind: str, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for source in (path, tmp_path):
        assert str(path) in soon(lambda source=source: open_catalog(source), f"{kind}.*({remedy})")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-Q4_K_M.gguf", "GGUF files, of llama.cpp, are not read"),
        ("model.safetensors.incomplete", "an incomplete download: run it again"),
        ("weights.tar", "an archive: unpack it first"),
    ],
)
def test_sources_that_are_not_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    soon(lambda: open_catalog(tmp_path / name), message)
    soon(lambda: open_catalog(tmp_path), f"no checkpoint in this directory.*{message}", ZerostartError)


@pytest.mark.parametrize("escape", ["\x1b[2J", "\r", "\n", "\x9b", "\u2028", "\u202e", "\x07"])
def test_names_act_on_no_terminal(tmp_path: Path, escape: str) -> None:
    for name in ("latest", "latest_universal"):
        (tmp_path / name).write_bytes(f"global{escape}_step".encode())
        text = soon(lambda: open_catalog(tmp_path), ".", ZerostartError)
        assert escape not in text
        (tmp_path / name).unlink()
    file = f"shard{escape}.safetensors"
    index = {"weight_map": {f"a{escape}": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert escape not in soon(lambda: open_catalog(tmp_path), "missing", ZerostartError)
    save_file({"b": torch.ones(1)}, tmp_path / file)
    assert escape not in soon(lambda: open_catalog(tmp_path), "no shard has it")
    assert ReadError(f"a{escape}").args == (f"a{escape}",)


def test_commands_and_logs_show_names_and_carry_nothing_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    import zerostart
    from zerostart.cli import main

    evil = "a\x1b]0;owned\x07\x9b2J\u202e\r\nerror: forged"
    for folder, name in (("one", evil), ("two", f"{evil}2")):
        (tmp_path / folder).mkdir()
        save_file({name: torch.ones(2)}, tmp_path / folder / "model.safetensors")
        described = {"model_type": "llama", "architectures": [f"Llama{evil}"]}
        (tmp_path / folder / "config.json").write_text(json.dumps(described))
    for command in (["inspect", "one"], ["inspect", "one", "--json"], ["diff", "one", "two"]):
        with pytest.raises(SystemExit):
            main(
                [
                    command[0],
                    *(str(tmp_path / part) if part in ("one", "two") else part for part in command[1:]),
                ]
            )
    with pytest.raises(ZerostartError) as refused:
        zerostart.load(str(tmp_path / "one"), lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
    logging.getLogger("zerostart").warning("%s was not understood", evil)
    printed = "".join(capsys.readouterr())
    for text in (printed, str(refused.value), caplog.text):
        assert "owned" in text
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}
        assert "\nerror: forged" not in text


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
