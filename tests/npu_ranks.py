"""Ranks whose accelerator is the pretend one (``simulated/npu``); else as `ranks.run_ranks`.

torch takes an accelerator when it is imported, DeepSpeed once a process. So a process of its own, kept for
the session, has the environment for it, and its server forks the ranks.
"""

import atexit
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import Outcome, RankError

HERE = Path(__file__).parent
_driver: subprocess.Popen[bytes] | None = None


def npu_environment() -> dict[str, str]:
    """The environment of a process that has the pretend accelerator."""
    paths = [str(HERE / "simulated" / "npu"), str(HERE.parent)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "npu"}


def run_npu_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """See ``ranks.run_ranks``; the function makes the process group, as a user's script does."""
    outcomes = npu_outcomes(function, world_size, *arguments, timeout=timeout)
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.value for outcome in outcomes]


def npu_outcomes(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Outcome]:
    """See ``ranks.rank_outcomes``."""
    driver = _started()
    assert driver.stdin is not None, "the driver reads what it is to run"
    assert driver.stdout is not None, "the driver writes what became of it"
    # The first run waits for the imports of the server, and may wait for a compiler.
    watch = threading.Timer(timeout + 400, driver.kill)
    watch.start()
    try:
        pickle.dump(pickle.dumps((function, world_size, arguments, timeout)), driver.stdin)
        driver.stdin.flush()
        outcomes: list[Outcome] = pickle.load(driver.stdout)
    except BaseException:
        # What it answers later would be taken for the answer to the next one.
        driver.kill()
        driver.wait()
        raise
    finally:
        watch.cancel()
    return outcomes


def _started() -> subprocess.Popen[bytes]:
    global _driver
    if _driver is None or _driver.poll() is not None:
        _driver = subprocess.Popen(
            [sys.executable, "-m", "tests.npu_ranks"],
            env=npu_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(_driver.kill)
    return _driver


def _drive() -> None:
    """Body of the driver: run what comes, until nothing more does."""
    from tests import ranks

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    while True:
        try:
            function, world_size, arguments, timeout = pickle.loads(pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        outcomes = ranks.rank_outcomes(
            function, world_size, *arguments, timeout=timeout, grace=ranks.GRACE_SECONDS, process_group=False
        )
        pickle.dump(outcomes, answers)
        answers.flush()


if __name__ == "__main__":
    _drive()
