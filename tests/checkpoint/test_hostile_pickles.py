"""Forged archives and pickles run no code."""

import contextlib
import io
import os
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zerostart.checkpoint.formats.inert_pickle import read_inert_pickle
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError


def rewrite(path: Path, edit: Callable[[dict[str, bytes]], None], method: int = 0, **info: Any) -> Path:
    """Write the archive again with edited records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    edit(records)
    with zipfile.ZipFile(path, "w", method, **info) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def bin_file(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(12.0).view(3, 4), "v": torch.ones(5)}, tmp_path / "x.bin")
    return tmp_path / "x.bin"


def with_pickle(path: Path, content: bytes) -> Path:
    return rewrite(path, lambda records: records.update({"x/data.pkl": content}))


def error_of(path: Path, match: str) -> str:
    with pytest.raises(CheckpointError, match=match) as caught:
        open_catalog(path)
    assert path.name in str(caught.value)
    return str(caught.value)


class CodeCall:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch {}",)),
        (eval, ("open('{}', 'w')",)),
        (getattr, (dict, "get")),
        (torch.load, ("{}",)),
        (torch.hub.load, ("{}",)),
        (pickle.loads, (b"",)),
        (io.open, ("{}", "w")),
    ],
)
def test_code_is_refused_and_never_run(function: Any, arguments: tuple[Any, ...], bin_file: Path) -> None:
    evidence = bin_file.with_name("evidence")
    arguments = tuple(a.format(evidence) if isinstance(a, str) else a for a in arguments)
    for content in (
        CodeCall(function, *arguments),
        {"w": CodeCall(function, *arguments)},
        [CodeCall(function, *arguments)],
    ):
        text = error_of(with_pickle(bin_file, pickle.dumps(content, protocol=2)), "which is code")
        assert function.__name__ in text
        assert "safetensors" in text
    assert not evidence.exists()


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02" + STORAGE + b")R.", "damaged"),
        (b"\x80\x02" + STORAGE + b"}b.", "damaged"),
        (b"\x80\x02X\x01\x00\x00\x00a)R.", "a str is called"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls 'torch.FloatStorage'"),
        (b"\x80\x02ctorch\nTensor\n)\x81.", "not a state dict"),  # NEWOBJ
        (b"\x80\x02(ios\nsystem\n.", "which is code"),  # INST
        (b"\x80\x02(cos\nsystem\no.", "which is code"),  # OBJ
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "which is code"),  # STACK_GLOBAL
        (b"\x80\x02\x82\x01.", "damaged"),  # EXT1
        (b"\x80\x02cbuiltins\ngetattr\n.", "'builtins.getattr'"),
        (b"\x80\x02c__main__\nx\n.", "'__main__.x'"),
        (b"\x80\x02c" + b"a" * 5000, "which is code"),
        (b"\x80\x02Pxyz\n.", "not a storage"),  # PERSID
        (b"\x80\x02K\x01Q.", "not a storage"),
        (b"\x80\x02}]K\x01s.", "list for a key"),
        (b"\x80\x02" + STORAGE + b"K\x01K\x01s.", "damaged .*'StorageRecord'"),
        (b"\x80\x02]K\x01\x85b.", "damaged"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "damaged"),
        (b"\x80\x02\x8a\xff\x01.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"", "damaged"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x01K\x01K\x01K\x01K\x01tR.", "something other"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "damaged"),
        (b"\x80\x02ctorch\nSize\nN\x85R.", "other than sizes"),
        (b"\x80\x02ccollections\nOrderedDict\n]N\x61\x85R.", "damaged .*argument"),
        (b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch.device\n\n)tR.", "which is code"),
    ],
)  # fmt: skip
def test_foreign_pickles_are_refused(content: bytes, message: str, bin_file: Path) -> None:
    error_of(with_pickle(bin_file, content), message)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"x/byteorder": b"big"}, "big-endian"),
        ({"x/data/0": b"\0" * 44}, "beyond its storage of 44 bytes"),
        ({"y/data.pkl": b""}, "no data.pkl"),
        ("x/data/1", "does not have"),
        ("x/data.pkl", "no data.pkl"),
        (zipfile.ZIP_DEFLATED, "compressed"),
        (None, "twice"),
    ],
    ids=str,
)
def test_archives_that_contradict_their_pickle_are_refused(edit: Any, message: str, bin_file: Path) -> None:
    if isinstance(edit, dict):
        rewrite(bin_file, lambda records: records.update(edit))
    elif isinstance(edit, str):
        rewrite(bin_file, lambda records: records.pop(edit) and None)
    elif edit is None:
        with zipfile.ZipFile(bin_file, "a") as archive:
            archive.writestr("x/data/0", b"\0" * 48)
    else:
        rewrite(bin_file, lambda records: None, edit)
    error_of(bin_file, message)


def view_of(shape: str, strides: str, offset: str) -> bytes:
    """Build a pickle of one tensor from opcodes."""
    tensor = f"ctorch._utils\n_rebuild_tensor\n(§{offset}{shape}{strides}tR".encode("latin1")
    return b"\x80\x02}X\x01\x00\x00\x00w" + tensor.replace("§".encode("latin1"), STORAGE) + b"s."


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "message"),
    [
        ("K\x0d\x85", "K\x01\x85", "K\x00", "beyond its storage"),
        ("K\x0c\x85", "K\x01\x85", "K\x01", "beyond its storage"),
        ("K\x02\x85", "K\x0c\x85", "K\x00", "beyond its storage"),
        ("K\x02\x85", "J\xff\xff\xff\xff\x85", "K\x00", "something other"),
        ("K\x02\x85", "K\x01\x85", "J\xff\xff\xff\xff", "something other"),
        ("K\x02\x85", "K\x01K\x01\x86", "K\x00", "something other"),
        ("\x88\x85", "K\x01\x85", "K\x00", "something other"),
        ("\x8a\x08" + "\xff" * 7 + "\x7f\x85", "K\x00\x85", "K\x00", "overflows"),
        ("\x8a\x09" + "\xff" * 8 + "\x7f\x85", "K\x00\x85", "K\x00", "something other"),
    ],
)
def test_views_beyond_storage(shape: str, strides: str, offset: str, message: str, bin_file: Path) -> None:
    error_of(with_pickle(bin_file, view_of(shape, strides, offset)), message)


def test_older_formats_of_torch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    text = error_of(path, r"since version 1\.6")
    assert "bare pickle" in text
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), path)
    error_of(path, "which is code")


def _nested_lists(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def _doubled_tuples(depth: int) -> bytes:
    """Build a dictionary with a key of nested tuples."""
    return b"\x80\x02}" + b")" + b"2\x86" * depth + b"Ns."


_COUNT = 100_000


#: Opcodes that push a class and store it as memo 0.
_CLASS = b"\x80\x02cany\nclass\nq\x00"


def _repeat(opcode: bytes, start: bytes = b"N") -> bytes:
    return start + opcode * _COUNT


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps(_nested_lists(60), 2),
        b"\x80\x02]q\x00h\x00a.",
        _doubled_tuples(200),
        b"\x80\x02}" + _repeat(b"\x85") + b"Ns.",
        b"\x80\x02}(" + _repeat(b"\x85") + b"Nu.",
        _CLASS + b")}" + _repeat(b"\x85") + b"Ns\x92.",
        b"\x80\x02}("
        + b"".join(b"\x8a\xff%bN" % ((n << 61) - n).to_bytes(255, "little") for n in range(_COUNT))
        + b"u.",
        b"\x80\x02J\xff\xff\xff\xffq\x00J\xfe\xff\xff\xffq\x0100}("
        + b"".join(b"(%btN" % b"".join(b"h%c" % (n >> bit & 1) for bit in range(16)) for n in range(1 << 16))
        + b"u.",
        b"\x80\x02\x8b" + struct.pack("<i", -6) + b".",  # a length that moves the reader backwards
        b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 36) + b"a.",
        b"\x80\x04\x8d" + struct.pack("<Q", (1 << 64) - 1) + b"a.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b".",
        b"\x80\x02ctorch._utils\n_rebuild_tensor\nN}X\x08\0\0\0__code__Ns\x86b.",
        _CLASS + b"N}X\x04\0\0\0nameNs\x86b.",
        b"\x80\x02](](" + b"N" * _COUNT + b"eq\x00" + b"h\x00" * _COUNT + b"e.",
        b"\x80\x02](X"
        + struct.pack("<i", _COUNT)
        + b"a" * _COUNT
        + b"\x85q\x00"
        + b"ctorch\nSize\nh\x00R" * 1000
        + b"e.",
    ],
    ids=[
        "lists in lists",
        "a list in itself",
        "tuples in tuples",
        "a tuple for a key",
        "keys",
        "a keyword",
        "integers of one hash",
        "tuples of one hash",
        "an integer of negative length",
        "an integer of a million bytes",
        "missing bytes",
        "missing text",
        "missing array",
        "attributes of a call",
        "attributes of a class",
        "a long list many times",
        "shapes of a text",
    ],
)
def test_small_pickles_take_little_time_and_memory(raw: bytes) -> None:
    started = time.process_time()
    with _limited_memory(), pytest.raises(CheckpointError, match=r"states\.pt"):
        read_inert_pickle(raw, "states.pt")
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "raw",
    [_repeat(b"\x85"), _repeat(b"]", b"") + b"a" * (_COUNT - 1), _repeat(b"}N", b"") + b"}" + b"s" * _COUNT],
    ids=["tuples", "lists", "dictionaries"],
)
def test_deeply_nested_pickles_are_read(raw: bytes) -> None:
    with _limited_memory():
        assert read_inert_pickle(b"\x80\x02Nr\xff\xff\xff\x7f.", "states.pt") is None  # memo index 2**31 - 1
        read_inert_pickle(b"\x80\x02" + raw + b".", "states.pt")
        read_inert_pickle(_CLASS + _repeat(b"h\x00)\x81", b"") + b"b" * (_COUNT - 1) + b".", "states.pt")


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<i", len(text)) + text.encode()


def _with_versions(versions: bytes) -> bytes:
    """Build a state dict with the given ``_metadata``."""
    tensor = b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"K\x00K\x05\x85K\x01\x85tR"
    return b"\x80\x02}" + _text("w") + tensor + b"s}" + _text("_metadata") + versions + b"sb."


def test_module_versions_may_be_anything_small(bin_file: Path) -> None:
    names = b"".join(_text(f"{number}") + b"h\x00" for number in range(3000))
    wide = b"}(" + b"".join(_text(f"{number}") + b"K\x01" for number in range(3000)) + b"uq\x000"
    long = b"}" + _text("version") + _text("v" * _COUNT) + b"sq\x000"
    error_of(with_pickle(bin_file, _with_versions(wide + b"}(" + names + b"u")), "members in all")
    for versions in (b"K\x01", b"N", long + b"}(" + names + b"u"):
        catalog = open_catalog(with_pickle(bin_file, _with_versions(versions)))
        assert len(str(catalog.versions)) < _COUNT


def test_deeply_nested_key_is_ignored(bin_file: Path) -> None:
    key = b"ccollections\nCounter\n" + b")" + b"\x85" * 5000 + b"\x85R"
    tensor = view_of("K\x05\x85", "K\x01\x85", "K\x00").removesuffix(b".")
    assert list(open_catalog(with_pickle(bin_file, tensor + key + b"Ns.")).tensors) == ["w"]


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the address space to 256 MiB more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
