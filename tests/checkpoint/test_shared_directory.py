"""A directory that many use, step by step at random: a model in memory says what has to be there."""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import zerostart
from tests.checkpoint.shared_directory import KINDS, SHARDS, SINGLE, value_of
from tests.syscalls import Calls

NAMES = ["notes", "log", "runs/events", "model/README.md", "state/own", "second/own", "tokenizer.json"]
NAMES += ["model-00001-of-00009.safetensors", "other.safetensors", "model/model-00003-of-00003.safetensors"]
names, kinds = st.sampled_from(NAMES), st.sampled_from(sorted(KINDS))
sizes, changes, contents = st.sampled_from([SHARDS, SINGLE]), st.integers(0, 5), st.binary(max_size=9)


class SharedDirectory(RuleBasedStateMachine):
    """Others create, replace, append, delete and chmod, between saves and at any call of one."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "out"
        self.path.mkdir()
        self.files: dict[str, tuple[bytes, int]] = {}
        self.values: dict[str, float | None] = dict.fromkeys(KINDS)
        self.number = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def _write(self, name: str, data: bytes, replace: bool) -> None:
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        if replace:
            (place.parent / ".new").write_bytes(data)
            (place.parent / ".new").replace(place)
        else:
            place.write_bytes(data)
        self.files[name] = (data, stat.S_IMODE(place.stat().st_mode))

    def _is_free(self, name: str) -> bool:
        """Not what a save has written: of that, files beside weights are written as soon as they go."""
        return name in self.files or not (self.path / name).exists()

    def _other(self, name: str, what: int, data: bytes) -> None:
        if not self._is_free(name):
            return
        if what == 0 or name not in self.files:
            self._write(name, data, replace=bool(len(data) % 2))
        elif what == 1:
            with (self.path / name).open("ab") as file:
                file.write(data)
            self.files[name] = (self.files[name][0] + data, self.files[name][1])
        elif what == 2:
            (self.path / name).unlink()
            del self.files[name]
        else:
            (self.path / name).chmod(0o600 + what)
            self.files[name] = (self.files[name][0], 0o600 + what)

    @rule(name=names, what=changes, data=contents)
    def others_work(self, name: str, what: int, data: bytes) -> None:
        self._other(name, what, data)

    @rule(kind=kinds, size=sizes)
    def save(self, kind: str, size: int) -> None:
        self.number += 1
        KINDS[kind](self.path, self.number, size)
        self.values[kind] = self.number

    @rule(
        kind=kinds, size=sizes, at=st.integers(0, 90), name=names, what=changes, data=contents
    )  # fmt: skip
    def others_work_meanwhile(self, kind: str, size: int, at: int, name: str, what: int, data: bytes) -> None:
        """At a call of the save; and readers see the old one, or the new one, before and after it."""
        self.number += 1
        calls = Calls()
        meet: Callable[..., Any] = calls._meet

        def met(called: str, call: Callable[[], Any]) -> Any:
            if len(calls.names) != at:
                return meet(called, call)
            calls.names.append(called)
            kept = {n: getattr(os, n) for n in calls.kept}
            for n, function in calls.kept.items():
                setattr(os, n, function)
            self._other(name, what, data)
            self._read(kind)
            for n, function in kept.items():
                setattr(os, n, function)
            return call()

        calls._meet = met  # type: ignore[method-assign]
        with calls.watched():
            KINDS[kind](self.path, self.number, size)
        self.values[kind] = self.number

    @rule(kind=kinds, size=sizes, at=st.integers(0, 110))
    def a_save_is_killed(self, kind: str, size: int, at: int) -> None:
        self.number += 1
        with Calls().watched(chosen=at):
            KINDS[kind](self.path, self.number, size)
        found = value_of(self.path, kind)
        assert found in (self.values[kind], self.number)
        self.values[kind] = found

    @rule(kind=kinds, size=sizes, at=st.integers(0, 110), number=st.sampled_from([5, 28]))
    def a_save_fails(self, kind: str, size: int, at: int, number: int) -> None:
        self.number += 1
        try:
            with Calls().watched(chosen=at, error=number):
                KINDS[kind](self.path, self.number, size)
        except zerostart.errors.WriteError as error:
            there = "all is there" in str(error) or "a part of it" in str(error)
        else:
            there = True
        self.values[kind] = self.number if there else self.values[kind]

    def _read(self, saving: str) -> None:
        for kind, value in self.values.items():
            assert value_of(self.path, kind) in ((value, self.number) if kind == saving else (value,))

    @invariant()
    def all_is_there(self) -> None:
        self._read("")
        for name, (data, mode) in self.files.items():
            assert (self.path / name).read_bytes() == data, name
            assert stat.S_IMODE((self.path / name).stat().st_mode) == mode, name
        if any(value is not None for value in self.values.values()):
            zerostart.verify(self.path)


def run(examples: int, steps: int, derandomize: bool) -> None:
    quiet = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=derandomize,
        suppress_health_check=list(HealthCheck), print_blob=True, database=None,
    )  # fmt: skip
    run_state_machine_as_test(SharedDirectory, settings=quiet)


@pytest.fixture(autouse=True)
def _without_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_a_shared_directory() -> None:
    run(examples=5, steps=12, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_shared_directory_for_long() -> None:
    """10 000 steps."""
    run(examples=200, steps=50, derandomize=False)
