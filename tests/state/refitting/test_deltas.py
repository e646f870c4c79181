"""Pushes that send what has changed alone: the same bits as a push of everything, or that push after all."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerostart
from zerostart import serving
from zerostart.state.refitting.changes import BLOCK, Blocks, pack, places_in, unit_of, unpack

#: Elements of fp32: a few blocks.
WIDE = (256, 1024)


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.9])
def test_what_is_packed_comes_out_again(unit: int, share: float) -> None:
    chance = np.random.default_rng(0)
    words = chance.integers(1, 1 << 8 * unit, 30_011, dtype=f"u{unit}")
    words[chance.random(len(words)) >= share] = 0
    packed = pack(words.view(np.uint8), unit)
    if share == 0.9:
        assert packed is None
        return
    assert packed is not None
    places, differences = unpack(packed, unit)
    found = np.zeros_like(words)
    found[places] = differences
    assert np.array_equal(found, words)
    assert len(packed.gaps) <= len(places) + 30_011 // 255 + 1


def test_places_are_those_of_the_bytes_in_their_rows() -> None:
    rows = np.array([[1000, 6, 20, 4], [10, 8, 0, 1], [400, 2, 4, 9]], np.int64)
    every = [
        start + n * stride + at
        for start, width, stride, count in rows.tolist()
        for n in range(count)
        for at in range(width)
    ]
    assert places_in(rows, np.arange(len(every))).tolist() == every
    assert unit_of(rows) == 2
    assert unit_of(rows + np.array([1, 0, 0, 0])) == 1
    with pytest.raises(ValueError, match="behind the last byte"):
        places_in(rows, np.array([len(every)]))


def test_blocks_say_what_has_changed_since_a_version() -> None:
    blocks = Blocks(5 * BLOCK + 3)
    blocks.note(BLOCK - 1, BLOCK + 1, 2)
    blocks.note_places(np.array([5 * BLOCK + 2]), 3)
    since = {version: blocks.since(version) for version in (1, 2, 3)}
    said = {v: [c.between(n * BLOCK, n * BLOCK + 1) for n in range(6)] for v, c in since.items()}
    assert said == {1: [True, True, False, False, False, True], 2: [False] * 5 + [True], 3: [False] * 6}
    assert since[2].between(3 * BLOCK, 5 * BLOCK + 3)
    assert not since[2].between(0, 5 * BLOCK)


@contextmanager
def _served(**options: Any) -> Iterator[tuple[nn.Module, nn.Module, serving.Receiver, Any]]:
    """A model, an engine in a thread that has it the other way round, and what brings one to the other."""
    weights = {"weight": torch.rand(WIDE), "bias": torch.zeros(WIDE[0])}
    model = zerostart.load(weights, lambda: nn.Linear(WIDE[1], WIDE[0]), engine="fsdp2", progress=False)
    engine = nn.Linear(WIDE[0], WIDE[1], bias=False)

    def load(pairs: Any) -> None:
        for name, tensor in pairs:
            if name == "weight":
                engine.weight.data.copy_(tensor.t())

    receiver = serving.Receiver(engine, load)
    with zerostart.refit(model, timeout=20, full_every=4, **options) as refitter:
        thread = threading.Thread(target=serving.serve, args=(receiver, refitter.address), daemon=True)
        thread.start()
        yield model, engine, receiver, refitter
    thread.join(20)


@pytest.mark.parametrize("transport", ["shared_memory", "group"])
def test_a_push_sends_what_has_changed(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _served(transport=transport) as (model, engine, receiver, refitter):
        filled: list[bool] = []
        fill = receiver._fill

        def noted(incoming: Any, sums: Any, changed: Any) -> None:
            filled.append(changed is not None)
            fill(incoming, sums, changed)

        monkeypatch.setattr(receiver, "_fill", noted)
        weight = model.weight.detach().to_local()

        def push() -> Any:
            report = refitter.push()
            assert torch.equal(engine.weight.detach(), weight.t())
            return report

        report = push()
        assert (report.base, report.changed_bytes) == (None, report.owned_bytes)
        assert report.kept_bytes == (report.owned_bytes if transport == "group" else 0)
        # Two elements, of which one changes in one of its four bytes alone.
        with torch.no_grad():
            weight[3, 5] = -weight[3, 5]
            weight[200, 7] += 1
        report = push()
        assert report.base == 1
        assert 0 < report.changed_bytes <= 8
        assert report.moved_bytes <= (5000 if transport == "group" else 2 * BLOCK)
        # Nothing at all.
        report = push()
        assert (report.base, report.changed_bytes, report.moved_bytes) == (2, 0, 0)
        # So much that it is sent as it lies.
        with torch.no_grad():
            weight.mul_(2)
        assert push().base == 3
        report = push()
        assert (report.base, report.changed_bytes) == (None, report.owned_bytes)
        assert filled == [False, True, True, True, True]
        # The model may be stepped as soon as the bytes have left it.
        before = weight.clone()
        pushing = refitter.push(wait=False)
        with torch.no_grad():
            weight[200] += 1
        assert pushing.wait().changed_bytes == 0
        assert torch.equal(engine.weight.detach(), before.t())
        assert push().base == 6
        # What somebody has done to the engine is noticed, and mended.
        with torch.no_grad():
            engine.weight[900, 4] = 7
        assert push().base == 7
        assert filled[-2:] == [True, False]
        # After a failure, whatever the transport had: all of it.
        monkeypatch.setattr(receiver, "_compare", lambda *given, **options: 1 / 0)
        with pytest.raises(zerostart.errors.VerifyError, match="push again"):
            refitter.push()
        monkeypatch.undo()
        assert receiver.version is None
        assert push().base is None


def test_a_worker_that_comes_later_gets_everything() -> None:
    with _served(transport="group") as (model, _, _, refitter):
        refitter.push()
        assert refitter.push().base == 1
        other = nn.Linear(WIDE[1], WIDE[0])
        receiver = serving.Receiver(other, lambda pairs: other.load_state_dict(dict(pairs)), name="later")
        thread = threading.Thread(target=serving.serve, args=(receiver, refitter.address), daemon=True)
        thread.start()
        refitter._session.wait_for(2, 20)
        report = refitter.push()
        assert report.base is None
        assert torch.equal(other.weight.detach(), model.weight.to_local())
        assert refitter.push().base == 3
    thread.join(20)


def test_what_is_not_read_back_is_filled_in_again() -> None:
    with _served() as (model, _, _, refitter):
        engine = nn.Linear(WIDE[1], 2 * WIDE[0], bias=False)

        def load(pairs: Any) -> None:
            for name, tensor in pairs:
                if name == "weight":  # as heads are that several ranks share
                    engine.weight.data.copy_(torch.cat([tensor, tensor]))

        receiver = serving.Receiver(engine, load, name="twice")
        thread = threading.Thread(target=serving.serve, args=(receiver, refitter.address), daemon=True)
        thread.start()
        refitter._session.wait_for(2, 20)
        refitter.push()
        with torch.no_grad():
            engine.weight[5, 5] = 7
        assert refitter.push().base == 1
        weight = model.weight.detach().to_local()  # type: ignore[operator, union-attr]
        assert torch.equal(engine.weight.detach(), torch.cat([weight, weight]))
    thread.join(20)
