"""Files from strangers: what is damaged or made up is refused soon, by name, and is never weights."""

import json
import os
import pickle
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.catalog import Assembled
from zerostart.checkpoint.formats.inert_pickle import read_inert_pickle
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


def doubled(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def test_pickles_that_hold_themselves_over_and_over(tmp_path: Path) -> None:
    """Some hundred bytes that nobody could print, and lists that are copied by each of a million calls."""
    soon(lambda: read_inert_pickle(pickle.dumps(doubled(60), 2), "x"), "members in all")
    itself: list[Any] = []
    itself.append(itself)
    soon(lambda: read_inert_pickle(pickle.dumps(itself, 2), "x"), "holds itself")
    pairs = b"\x80\x02(" + b"K\x01K\x02\x86" * 20000 + b"tq\x000"
    calls = b"cany\nclass\nq\x01" + b"h\x01h\x00R" * 20000 + b"."
    soon(lambda: read_inert_pickle(pairs + calls, "x"), "over and over")
    key = b"\x80\x02(" + b"K\x01" * 100000 + b"tq\x000}q\x01" + b"h\x00K\x02s" * 100000 + b"."
    soon(lambda: read_inert_pickle(key, "x"), "tuple for a key")
    zero3(tmp_path, (4, 4), shared_params={"a": doubled(60)})
    assert "model_states.pt" in soon(lambda: open_catalog(tmp_path), "members in all")
    zero3(tmp_path, (4, 4), shared_params={"a": [[1, 2]]})
    soon(lambda: open_catalog(tmp_path), "has no name")


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


def test_what_lies_beside_is_copied_where_it_is_a_file(tmp_path: Path) -> None:
    """A save copies what is beside the weights that were loaded."""
    from zerostart.state.saving.save import copy_beside

    root, made = tmp_path / "root", tmp_path / "made"
    templates = root / "additional_chat_templates"
    templates.mkdir(parents=True)
    made.mkdir()
    for folder in (root, templates):
        (folder / "own.jinja").write_text("x")
        (folder / "linked.jinja").symlink_to(folder / "own.jinja")
        os.mkfifo(folder / "fifo.jinja")
        (folder / "nowhere.jinja").symlink_to("nowhere")
        (folder / "zeros.jinja").symlink_to("/dev/zero")
        (folder / "all.jinja").symlink_to(root)
    (templates / "zeros.jinja").unlink()  # which would be copied for ever
    copy_beside(root, made)
    assert {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()} == {
        f"{folder}{name}.jinja" for folder in ("", "additional_chat_templates/") for name in ("own", "linked")
    }


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


@pytest.mark.slow
def test_headers_of_a_hundred_megabytes(tmp_path: Path) -> None:
    many = b",".join(
        b'"%d":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}' % (n, n, n + 1) for n in range(1_700_000)
    )
    soon(lambda: open_catalog(header(tmp_path, b"{" + many + b"}", 1_700_000)), "beyond the limit")
    one = b'{"a":{"dtype":"U8","shape":[' + b"1," * 48_000_000 + b'1],"data_offsets":[0,1]}}'
    soon(lambda: open_catalog(header(tmp_path, one, 1)), "beyond the limit")
    index = b'{"weight_map":{' + b",".join(b'"%d":{}' % n for n in range(4_000_000)) + b"}}"
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    soon(lambda: open_catalog(tmp_path / "model.safetensors.index.json"), "more than")


def test_an_archive_of_no_records(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, 0, 4, 0)
    path.write_bytes(b"PK\3\4" + end)
    soon(lambda: open_catalog(path), "no data.pkl")


def tar(path: Path) -> None:
    inner = path.with_name("inner")
    inner.write_text("x")
    with tarfile.open(path, "w") as archive:
        archive.add(inner, "inner")
    inner.unlink()


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.safetensors", "x")


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
        (tar, "tar archive", "unpack|torch.load"),
        (bytes(4096), "nothing but zeros", "download it again"),
    ],
    ids=["pointer", "page", "gguf", "gzip", "tar", "zeros"],
)
def test_other_files_are_called_what_they_are(
    tmp_path: Path, name: str, content: Any, kind: str, remedy: str
) -> None:
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    for source in (path, tmp_path):
        assert str(path) in soon(lambda source=source: open_catalog(source), f"{kind}.*({remedy})")


def test_a_zip_file_in_the_place_of_safetensors(tmp_path: Path) -> None:
    zipped(tmp_path / "model.safetensors")
    soon(lambda: open_catalog(tmp_path), r"a zip archive, as torch\.save writes it; call it \.bin")
    save_file({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    soon(lambda: open_catalog(tmp_path / "pytorch_model.bin"), "not a file written by torch.save")


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


def test_damaged_records_are_named_with_their_file(tmp_path: Path) -> None:
    for model in (
        {"param_shapes": [{"weight": "4, 2"}]},
        {"param_shapes": [{"weight": (4, -2)}]},
        {"param_shapes": [[("weight",)]]},
        {"param_shapes": [5]},
        {"frozen_param_shapes": 5},
        {"buffer_names": 5},
        {"buffer_names": [["a"]]},
        {"shared_params": "ab"},
        {"frozen_param_fragments": [1], "frozen_param_shapes": {"a": (2,)}},
    ):
        zero3(tmp_path, (4, 4), **model)
        for read in (open_catalog, training_states):
            assert str(tmp_path) in soon(lambda read=read: read(tmp_path), ".")


@pytest.mark.parametrize("escape", ["\x1b[2J", "\r", "\x9b", "\u202e", "\x07"])
def test_names_act_on_no_terminal(tmp_path: Path, escape: str) -> None:
    for name in ("latest", "latest_universal"):
        (tmp_path / name).write_text(f"global{escape}_step", encoding="utf-8")
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
    logged = caplog.text  # whose messages may have lines
    for text in (printed, str(refused.value), logged):
        assert "owned" in text
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}
        assert text is logged or "\nerror: forged" not in text
