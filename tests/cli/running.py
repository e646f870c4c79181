"""Commands of zerostart, run in the process of the tests."""

from collections.abc import Callable

import pytest

from zerostart.cli import main

#: Exit code, output and errors of a command with these arguments.
Run = Callable[..., tuple[int, str, str]]


def running(*command: str) -> Run:
    def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()  # what making the checkpoint printed
        with pytest.raises(SystemExit) as ended:
            main([*command, *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
