"""Paths as users write them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zerostart
from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError

VERBS: dict[str, Callable[[str], Any]] = {
    "load": zerostart.load,
    "plan": lambda path: zerostart.plan(path, world_size=2),
    "save": lambda path: zerostart.save(nn.Linear(2, 2), path),
    "save_state": lambda path: zerostart.save_state(path, nn.Linear(2, 2)),
    "load_state": lambda path: zerostart.load_state(path, nn.Linear(2, 2)),
    "verify": zerostart.verify,
    "diff": lambda path: zerostart.diff(path, path),
}


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_home_directory_is_an_error(verb: str) -> None:
    with pytest.raises(ConfigError, match="~no-such-user/model: no user of that name has a home directory"):
        VERBS[verb]("~no-such-user/model")


def test_home_directories_are_expanded_and_nul_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/model") == tmp_path / "model"
    with pytest.raises(ConfigError, match=r"'a\\x00b' is not a path: it contains a NUL character"):
        zerostart.verify("a\0b")
