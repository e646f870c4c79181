"""Run zerostart's commands in the tests' process."""

from collections.abc import Callable

import pytest

from zerostart.cli import main

#: Function that runs a command and returns its exit code, output and errors.
Run = Callable[..., tuple[int, str, str]]


def make_runner(*command: str) -> Run:
    def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()  # printed by fixtures
        with pytest.raises(SystemExit) as exit_info:
            main([*command, *arguments])
        out, err = capsys.readouterr()
        return int(exit_info.value.code or 0), out, err

    return run
