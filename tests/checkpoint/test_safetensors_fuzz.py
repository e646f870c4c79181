"""Damaged headers: our parser either refuses, or agrees with the safetensors library."""

import json
import random

import pytest
import safetensors

from zerostart.checkpoint.formats.safetensors import parse_header
from zerostart.errors import ZerostartError

SEEDS = 12
MUTATIONS_PER_SEED = 800
#: Values that numbers, names and structures are replaced by.
WEIRD = (
    *(
        b"-1",
        b"0",
        b"1",
        b"2",
        b"-0",
        b"1.0",
        b"1e1",
        b"4294967296",
        b"18446744073709551615",
        b"true",
        b"null",
    ),
    *(
        b"[]",
        b"{}",
        b'""',
        b'"F32"',
        b'"BF16"',
        b'"F4"',
        b'"\\u0041"',
        b'"\\ud83d\\ude00"',
        b"[0,0]",
        b"[1,1]",
    ),
)


def valid(rng: random.Random) -> tuple[bytes, int]:
    """JSON text of a legal header and the length of its data."""
    header: dict[str, object] = {}
    position = 0
    for number in range(rng.randint(1, 5)):
        width, dtype = rng.choice([(4, "F32"), (2, "BF16"), (8, "I64"), (1, "U8"), (1, "BOOL")])
        shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
        count = width
        for size in shape:
            count *= size
        header[f"layer.{number}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + count],
        }
        position += count
    if rng.random() < 0.5:
        header["__metadata__"] = {"format": "pt"}
    return json.dumps(header, separators=(",", ":")).encode(), position


def mutate(text: bytes, rng: random.Random) -> bytes:
    """One small damage: a byte, a cut, a repetition, a token swapped for another."""
    kind = rng.randrange(8)
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.randint(1, 12))
    if kind == 0:
        return text[:start] + bytes([rng.randrange(256)]) + text[start + 1 :]
    if kind == 1:
        return text[:start] + text[end:]
    if kind == 2:
        return text[:end] + text[start:]
    if kind == 3:
        digits = [i for i, byte in enumerate(text) if chr(byte).isdigit()]
        start = rng.choice(digits) if digits else start
        return text[:start] + rng.choice(WEIRD) + text[start + 1 :]
    if kind == 4:
        other = rng.randrange(len(text))
        return text[:start] + text[other : other + rng.randint(1, 30)] + text[start:]
    if kind == 5:
        return text[:start] + rng.choice(WEIRD) + text[end:]
    if kind == 6:
        return text[:start] + rng.choice([b" ", b"\n", b"\t"]) + text[start:]
    return text.replace(*rng.choice([(b"F32", b"I32"), (b"BF16", b"F16"), (b"layer", b"\\u006cay\\/er")]))


def outcome_of_library(content: bytes) -> dict[str, tuple[str, list[int], int]] | None:
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (info["dtype"], info["shape"], len(info["data"])) for name, info in found}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_mutated_headers(seed: int) -> None:
    rng = random.Random(seed)
    agreed = refused_by_both = 0
    for _ in range(MUTATIONS_PER_SEED):
        text, data = valid(rng)
        for _ in range(rng.randint(1, 3)):
            text = mutate(text, rng) or b"{"
        data = max(0, data + rng.choice([0, 0, 0, 0, -1, 1, 4]))
        content = len(text).to_bytes(8, "little") + text + bytes(data)
        expected = outcome_of_library(content)
        try:
            entries, _ = parse_header(text, len(content), "file")
        except ZerostartError:
            refused_by_both += expected is None
            continue
        assert expected is not None, f"laxer than the library: {text!r} with {data} bytes"
        assert {e.name: (e.dtype, list(e.shape), e.nbytes) for e in entries} == expected
        agreed += 1
    # Both outcomes have to occur, or the test would prove nothing.
    assert agreed > 10
    assert refused_by_both > 100


@pytest.mark.parametrize("seed", range(3))
def test_noise_never_escapes_the_error_tree(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1000):
        text = rng.randbytes(rng.randrange(60))
        with pytest.raises(ZerostartError):
            parse_header(text, rng.randrange(200), "file")
