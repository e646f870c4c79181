"""Damaged and forged files are refused by name."""

import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.fuzzing import FORMATS, READERS, dumps, write
from zerostart.checkpoint.catalog import Assembled
from zerostart.checkpoint.formats.training import check_whole, training_states
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError, ReadError, ZerostartError
from zerostart.geometry import Piece

#: Maximum CPU time of a refusal, in seconds.
CPU_SECONDS = 10


def error_of(action: Callable[[], Any], message: str, kind: type[ZerostartError] = CheckpointError) -> str:
    started = time.process_time()
    with pytest.raises(kind, match=message) as caught:
        action()
    assert time.process_time() - started < CPU_SECONDS
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def write_zero3(folder: Path, lengths: tuple[int, ...], **model_states: Any) -> Path:
    """Write a ZeRO-3 checkpoint with partitions of ``lengths`` elements."""
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
            {"module": {}, "param_shapes": shapes, **model_states},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
    return folder


def test_a_part_of_another_size_than_the_metadata_says_is_refused(tmp_path: Path) -> None:
    """torch would fill only the elements that the metadata names."""
    files = FORMATS["DCP"]()
    metadata = pickle.loads(files[".metadata"])
    metadata.state_dict_metadata["model.v"].chunks[1].sizes = torch.Size([1])
    write(files | {".metadata": pickle.dumps(metadata)}, tmp_path / "c")
    error_of(lambda: open_catalog(tmp_path / "c"), "part of 'v' is stored in another shape")


def test_an_empty_part_may_have_another_shape(tmp_path: Path) -> None:
    """FSDP2 with tensor parallelism saves an empty shard of dimension 1 as [0, 0]."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    files, empty, origin = FORMATS["DCP"](), dumps(torch.zeros(0, 0)), torch.Size([0, 3])
    metadata = pickle.loads(files[".metadata"])
    chunks = metadata.state_dict_metadata["model.w"].chunks
    chunks.append(ChunkStorageMetadata(origin, torch.Size([4, 0])))
    place = _StorageInfo("__1_0.distcp", len(files["__1_0.distcp"]), len(empty))
    metadata.storage_data[MetadataIndex("model.w", origin)] = place
    files["__1_0.distcp"] += empty
    write(files | {".metadata": pickle.dumps(metadata)}, tmp_path / "c")
    assert READERS["DCP"](tmp_path / "c")["w"] == torch.arange(12.0).numpy().tobytes()


def test_unequal_partitions_are_refused(tmp_path: Path) -> None:
    """Reading past the shorter partition would return uninitialised memory."""
    assert open_catalog(write_zero3(tmp_path, (4, 4))).weights["weight"].shape == (4, 2)
    for lengths in ((4, 2), (2, 4), (8, 4)):
        write_zero3(tmp_path, lengths)
        assert "rank_1" in error_of(lambda: open_catalog(tmp_path), "all ranks' must be equal")


ROW = (((8, 1),),)


def piece(origin: tuple[int, ...], axes: Any, offset: int = 0, unit: int = 8) -> Piece:
    return Piece(origin, axes, ("row",), unit, offset)


@pytest.mark.parametrize(
    ("shape", "pieces", "message"),
    [
        ((8,), (piece((0,), ROW),), ""),
        ((4, 2), (piece((0, 0), (((4, 2),), ((2, 1),))),), ""),
        ((9,), (piece((0,), ROW),), "has 9 elements, but the files hold 8"),
        ((7,), (piece((0,), ROW),), "lies outside that shape"),
        ((8,), (piece((0,), (((4, 1),),)), piece((2,), (((4, 1),),))), "fill the same elements"),
        ((8,), (piece((4,), (((4, 1),),)), piece((0,), (((4, 1),),), 4)), ""),
    ],
)
def test_pieces_must_tile(shape: tuple[int, ...], pieces: tuple[Piece, ...], message: str) -> None:
    assembled = {"joined": Assembled("joined", "F32", shape, pieces)}
    if not message:
        check_whole(assembled)
        return
    with pytest.raises(CheckpointError, match=message):
        check_whole(assembled)


def test_unfilled_destination_is_an_error(tmp_path: Path) -> None:
    from zerostart.geometry.layout import replicated
    from zerostart.recipe import Recipe, Target
    from zerostart.transfer.planning import Destination, join

    save_file({"row": torch.ones(8)}, tmp_path / "model.safetensors")
    target = Target("row", (9,), torch.float32)
    to = Destination("row", 9, 9, torch.float32, True)
    with pytest.raises(ZerostartError, match="row: the checkpoint holds only 8 of the 9 elements"):
        join(open_catalog(tmp_path), [(Recipe(target, (piece((0,), ROW),)), replicated((9,)), to)])


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
def test_special_files_are_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "zero":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    error_of(lambda: open_catalog(tmp_path), "not a regular file")


def write_sparse(path: Path, length: int = 1 << 32) -> None:
    with path.open("wb") as file:
        file.truncate(length)


@pytest.mark.parametrize("name", [".metadata", "latest", "config.json", "model.safetensors.index.json"])
def test_huge_sparse_files_are_refused(tmp_path: Path, name: str) -> None:
    write_sparse(tmp_path / name)
    if name == "config.json":
        from zerostart.checkpoint.source import read_config

        error_of(lambda: read_config(tmp_path), "beyond the limit")
    else:
        error_of(lambda: open_catalog(tmp_path), "beyond the limit|is not a pickle")


def write_header(tmp_path: Path, text: bytes, data: int = 0) -> Path:
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
def test_other_file_types_are_named(
    tmp_path: Path, name: str, content: bytes, kind: str, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for source in (path, tmp_path):
        assert str(path) in error_of(lambda source=source: open_catalog(source), f"{kind}.*({remedy})")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-Q4_K_M.gguf", "GGUF files, of llama.cpp, are not read"),
        ("model.safetensors.incomplete", "an incomplete download: run it again"),
        ("weights.tar", "an archive: unpack it first"),
    ],
)
def test_unsupported_sources_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    error_of(lambda: open_catalog(tmp_path / name), message)
    error_of(lambda: open_catalog(tmp_path), f"no checkpoint in this directory.*{message}", ZerostartError)


@pytest.mark.parametrize("escape", ["\x1b[2J", "\r", "\n", "\x9b", "\u2028", "\u202e", "\x07"])
def test_control_characters_in_names_are_not_printed(tmp_path: Path, escape: str) -> None:
    for name in ("latest", "latest_universal"):
        (tmp_path / name).write_bytes(f"global{escape}_step".encode())
        text = error_of(lambda: open_catalog(tmp_path), ".", ZerostartError)
        assert escape not in text
        (tmp_path / name).unlink()
    file = f"shard{escape}.safetensors"
    index = {"weight_map": {f"a{escape}": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert escape not in error_of(lambda: open_catalog(tmp_path), "missing", ZerostartError)
    save_file({"b": torch.ones(1)}, tmp_path / file)
    assert escape not in error_of(lambda: open_catalog(tmp_path), "no shard has it")
    assert ReadError(f"a{escape}").args == (f"a{escape}",)


def test_commands_and_logs_print_names_safely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    import zerostart
    from zerostart.cli import main

    hostile_name = "a\x1b]0;owned\x07\x9b2J\u202e\r\nerror: forged"
    for folder, name in (("one", hostile_name), ("two", f"{hostile_name}2")):
        (tmp_path / folder).mkdir()
        save_file({name: torch.ones(2)}, tmp_path / folder / "model.safetensors")
        config = {"model_type": "llama", "architectures": [f"Llama{hostile_name}"]}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    for command in (["inspect", "one"], ["inspect", "one", "--json"], ["diff", "one", "two"]):
        with pytest.raises(SystemExit):
            main(
                [
                    command[0],
                    *(str(tmp_path / part) if part in ("one", "two") else part for part in command[1:]),
                ]
            )
    with pytest.raises(ZerostartError) as caught:
        zerostart.load(str(tmp_path / "one"), lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
    logging.getLogger("zerostart").warning("%s was not understood", hostile_name)
    printed = "".join(capsys.readouterr())
    for text in (printed, str(caught.value), caplog.text):
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


@pytest.mark.parametrize("moments", [("exp_avg", "exp_avg_sq"), ("exp_avg",), ()])
def test_deepspeed_ranks_with_unequal_moments_are_refused(tmp_path: Path, moments: tuple[str, ...]) -> None:
    _zero_rank(tmp_path, 0, moments)
    _zero_rank(tmp_path, 1, ("exp_avg_sq", "other"))
    torch.save(
        {"module": {}, "param_shapes": [{"weight": torch.Size([4])}]}, tmp_path / "mp_rank_00_model_states.pt"
    )
    with pytest.raises(CheckpointError, match="files of two jobs, or of two moments, are mixed"):
        training_states(tmp_path)
    _zero_rank(tmp_path, 1, moments)
    states = training_states(tmp_path)
    assert states is not None
    assert set(states[2].weights) == {f"optimizer/{key}/weight" for key in moments}
