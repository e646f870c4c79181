"""Malformed safetensors headers raise a clear CheckpointError."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors

from zerostart.checkpoint.catalog import DTYPE_BITS
from zerostart.checkpoint.formats.safetensors import parse_header, read_header
from zerostart.errors import CheckpointError


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **fields: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **fields}


def blob(header: object, data: int = 0, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return len(text).to_bytes(8, "little") + text + b"x" * data


def error_of(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Headers that safetensors refuses, too: (header, bytes of data, part of the message).
MALFORMED: dict[str, tuple[object, int, str]] = {
    "a list": ([], 0, "not an object"),
    "null": (None, 0, "not an object"),
    "tensor null": ({"t": None}, 0, "tensor 't'"),
    "no dtype": ({"t": {"shape": [1], "data_offsets": [0, 4]}}, 4, "tensor 't'"),
    "no offsets": ({"t": {"dtype": "F32", "shape": [1]}}, 4, "tensor 't'"),
    "unknown dtype": ({"t": entry("F128", [1], [0, 16])}, 16, "'F128'"),
    "torch's name of a dtype": ({"t": entry("float32")}, 4, "'float32'"),
    "dtype a list": ({"t": entry(["F32"])}, 4, "unknown dtype"),
    "shape null": ({"t": entry(shape=None)}, 4, "shape"),
    "shape a string": ({"t": entry(shape="1")}, 4, "shape"),
    "shape negative": ({"t": entry(shape=[-1])}, 4, "shape"),
    "shape a truth value": ({"t": entry(shape=[True])}, 4, "shape"),
    "shape of strings": ({"t": entry(shape=["1"])}, 4, "shape"),
    "shape nested": ({"t": entry(shape=[[1]])}, 4, "shape"),
    "shape beyond 64 bits": ({"t": entry(shape=[0, 2**70], offsets=[0, 0])}, 0, "shape"),
    "shape product overflows to 0": ({"t": entry(shape=[2**32, 2**32], offsets=[0, 0])}, 0, "overflows"),
    "shape overflows, then 0": ({"t": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}, 0, "overflows"),
    "size overflows by width": ({"t": entry("F64", shape=[2**61], offsets=[0, 0])}, 0, "overflows"),
    "offsets null": ({"t": entry(offsets=None)}, 4, "data_offsets"),
    "offsets one": ({"t": entry(offsets=[4])}, 4, "data_offsets"),
    "offsets three": ({"t": entry(offsets=[0, 4, 4])}, 4, "data_offsets"),
    "offsets negative": ({"t": entry(offsets=[-4, 0])}, 4, "data_offsets"),
    "offsets truth values": ({"t": entry("U8", [1], [False, True])}, 1, "data_offsets"),
    "offsets beyond 64 bits": ({"t": entry(offsets=[0, 2**64])}, 4, "data_offsets"),
    "offsets reversed": ({"t": entry(offsets=[4, 0])}, 4, "before it begins"),
    "too few bytes": ({"t": entry(shape=[2])}, 4, "takes 8 bytes"),
    "too many bytes": ({"t": entry(offsets=[0, 8])}, 8, "takes 4 bytes"),
    "scalar of no bytes": ({"t": entry(shape=[], offsets=[0, 0])}, 0, "takes 4 bytes"),
    "half a byte": ({"t": entry("F4", [3], [0, 2])}, 2, "12 bits"),
    "six bits": ({"t": entry("F6_E2M3", [3], [0, 2])}, 2, "18 bits"),
    "overlap": ({"a": entry(), "b": entry(offsets=[0, 4])}, 4, "overlaps with tensor 'a'"),
    "empty tensor inside": ({"a": entry(), "b": entry(shape=[0], offsets=[2, 2])}, 4, "'b' overlaps"),
    "hole at the start": ({"a": entry(offsets=[4, 8])}, 8, "leaves 4 bytes before it"),
    "empty tensor behind the end": ({"a": entry(shape=[0], offsets=[4, 4])}, 4, "leaves 4 bytes"),
    "beyond the file": ({"a": entry()}, 3, "truncated"),
    "trailing bytes": ({"a": entry()}, 5, "1 bytes follow the last tensor"),
    "metadata a list": ({"__metadata__": []}, 0, "__metadata__"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
}

# Text that is no header, which safetensors refuses, too.
MALFORMED_TEXT: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 0, "nothing but zeros"),
    "not JSON": (b"hello", 0, "not valid JSON"),
    "cut off": (b'{"a":{"dtype":"F32"', 0, "not valid JSON"),
    "two objects": (b"{}{}", 0, "not valid JSON"),
    "padded with zero bytes": (b"{}\0\0", 0, "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4, "not UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), 0, "not UTF-8"),
    "half a surrogate pair": (
        b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
        "surrogate",
    ),
    "line break in a name": (
        b'{"a\nb":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
        "not valid JSON",
    ),
    "NaN": (b'{"t":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', 4, "not an integer"),
    "infinity": (b'{"t":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', 4, "not an integer"),
    "fraction": (b'{"t":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', 4, "not an integer"),
    "exponent": (b'{"t":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', 4, "not an integer"),
    "leading zero": (b'{"t":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', 4, "not valid JSON"),
    "ten thousand digits": (b'{"t":{"dtype":"F32","shape":[' + b"9" * 10_000 + b"]}}", 4, "not valid JSON"),
    "deep lists": (b'{"t":' + b"[" * 200_000, 0, "nested too deeply"),
    "deep objects": (b'{"t":' * 200_000, 0, "nested too deeply"),
    "deep and complete": (b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "nested too deeply"),
}

_VALID_ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
# Ambiguous headers that safetensors accepts.
AMBIGUOUS: dict[str, tuple[str, int, str]] = {
    "the same tensor twice": (f'{{"t":{_VALID_ENTRY},"t":{_VALID_ENTRY}}}', 4, "'t' occurs twice"),
    "the same after escaping": (f'{{"t":{_VALID_ENTRY},"\\u0074":{_VALID_ENTRY}}}', 4, "'t' occurs twice"),
    "metadata twice in itself": ('{"__metadata__":{"a":"b","a":"c"}}', 0, "'a' occurs twice"),
    "a field nobody knows": (f'{{"t":{_VALID_ENTRY[:-1]},"strides":[1]}}}}', 4, "exactly the fields"),
    "a list instead of fields": ('{"t":["F32",[1],[0,4]]}', 4, "exactly the fields"),
    "metadata null": ('{"__metadata__":null}', 0, "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_fields_are_refused(case: str, tmp_path: Path) -> None:
    header, data, message = MALFORMED[case]
    content = blob(header, data)
    assert message in error_of(tmp_path, content)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(content)


@pytest.mark.parametrize("case", MALFORMED_TEXT)
def test_malformed_text_is_refused(case: str, tmp_path: Path) -> None:
    text, data, message = MALFORMED_TEXT[case]
    content = blob(None, data, text)
    assert message in error_of(tmp_path, content)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(content)


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_ambiguous_headers_are_refused(case: str, tmp_path: Path) -> None:
    text, data, message = AMBIGUOUS[case]
    assert message in error_of(tmp_path, blob(None, data, text.encode()))


@pytest.mark.parametrize("size", range(8))
def test_file_shorter_than_its_length_field_is_refused(size: int, tmp_path: Path) -> None:
    assert "truncated" in error_of(tmp_path, b"\x10" + b"\0" * 6 if size == 7 else b"\0" * size)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 2**63, 100_000_001])
def test_enormous_header_is_refused_without_allocating(length: int, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    assert str(length) in error_of(tmp_path, length.to_bytes(8, "little") + b"{}" * 50)
    assert time.process_time() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KiB


def test_truncated_file_names_sizes_tensor_and_remedy(tmp_path: Path) -> None:
    complete = blob({"a": entry(), "b": entry(offsets=[4, 8])}, 8)
    message = error_of(tmp_path, complete[:-1])
    assert f"describes {len(complete)} bytes, but the file has {len(complete) - 1}" in message
    assert "tensor 'b' is cut off" in message
    assert "download it again" in message


def test_hostile_names_are_escaped_in_the_message(tmp_path: Path) -> None:
    message = error_of(tmp_path, blob({"\x1b[31m\n" + "n" * 1_000_000: entry("F9")}, 4))
    assert "\x1b" not in message
    assert "\n" not in message
    assert len(message) < 2000


def test_duplicates_are_found_in_linear_time(tmp_path: Path) -> None:
    pairs = ",".join(f'"{i}":"v"' for i in range(200_000))
    started = time.process_time()
    assert "'7' occurs twice" in error_of(tmp_path, blob(None, 0, f'{{{pairs},"7":"v"}}'.encode()))
    assert time.process_time() - started < 5


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_each_dtype_is_read_like_safetensors(dtype: str) -> None:
    content = blob({"t": entry(dtype, [2, 4], [0, DTYPE_BITS[dtype]])}, DTYPE_BITS[dtype])
    (name, info), *_ = safetensors.deserialize(content)
    raw = content[8 : 8 + int.from_bytes(content[:8], "little")]
    (parsed,), _ = parse_header(raw, len(content), "file")
    assert (parsed.name, parsed.dtype, list(parsed.shape)) == (name, info["dtype"], info["shape"])
    assert parsed.nbytes == len(info["data"])


def test_all_dtypes_of_safetensors_are_known() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(blob({"t": entry("NONE")}, 4))
    listed = str(caught.value).split("expected one of")[1].split(" at line")[0]
    assert {name.strip(" `") for name in listed.split(",")} == set(DTYPE_BITS)


def test_unusual_valid_headers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = {
        "": entry(),
        "empty": entry(shape=[0, 3], offsets=[4, 4]),
        "scalar": entry("I64", [], [4, 12]),
        "n" * 100_000: entry("U8", [1], [12, 13]),
        "päckchen 📦": entry("U8", [1], [13, 14]),
    }
    path.write_bytes(blob(header, 14, b"  " + json.dumps(header).encode() + b" \n\t "))
    entries, metadata, size = read_header(path, 3)
    assert [(e.name, e.nbytes, e.file) for e in entries] == [
        (name, header[name]["data_offsets"][1] - header[name]["data_offsets"][0], 3) for name in header
    ]
    assert metadata == {}
    assert size == path.stat().st_size == entries[-1].offset + 1
