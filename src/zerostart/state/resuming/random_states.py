"""The random states of a rank as rows of integers: of Python, NumPy, torch, and torch's device."""

from __future__ import annotations

import random
import struct

import numpy as np
import torch

from zerostart.distributed.world import default_device


def random_rows() -> dict[str, torch.Tensor]:
    """This rank's state of each generator, as a 1-D CPU tensor whose length is the same on every rank."""
    version, words, gauss = random.getstate()
    found = {"python": [version, *words, *_optional(gauss)]}
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found["numpy"] = [*map(int, keys), int(position), int(has_gauss), _bits(float(cached))]
    rows = {name: torch.tensor(row, dtype=torch.int64, device="cpu") for name, row in found.items()}
    rows["torch"] = torch.get_rng_state()
    device = default_device()
    if device.type != "cpu":
        rows["device"] = torch.get_device_module(device).get_rng_state(device)
    return rows


def set_random_rows(rows: dict[str, torch.Tensor]) -> None:
    """Put back what ``random_rows`` gave; a device's is left out where there is none of its kind."""
    version, *words, has_gauss, bits = rows["python"].tolist()
    random.setstate((version, tuple(words), _value(bits) if has_gauss else None))
    *keys, position, has_gauss, bits = rows["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _value(bits)))
    torch.set_rng_state(rows["torch"])
    device = default_device()
    if "device" in rows and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(rows["device"], device)


def _optional(value: float | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, _bits(value))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _value(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
