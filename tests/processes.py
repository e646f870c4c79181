"""Run commands in subprocesses that end with the command."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = str(Path(__file__).parents[1] / "src")


def run_command(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    paths: Sequence[Path] = (),
    seconds: float,
    name: str = "",
    code: int = 0,
) -> str:
    """Run a command in ``folder`` and return its output; ``paths`` and the sources lead PYTHONPATH.

    Raises AssertionError, beginning with ``name``, after ``seconds`` or for another exit code than ``code``.
    """
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(map(str, [*paths, SOURCES, *([inherited] if inherited else [])]))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{name}: not done after {seconds} s\n{output[-6000:]}") from None
    assert process.returncode == code, f"{name}: exit code {process.returncode}\n{output[-8000:]}"
    return output
