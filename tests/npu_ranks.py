"""Run functions on ranks whose accelerator is the pretend one (``simulated/npu``).

torch chooses its accelerator at import, DeepSpeed once in each process. So a driver process, started once in
a session with the right environment, has a server of its own that forks these ranks.
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

TESTS = Path(__file__).parent
_driver: subprocess.Popen[bytes] | None = None


def npu_environment() -> dict[str, str]:
    """Return the environment of a process that uses the pretend accelerator."""
    paths = [str(TESTS / "simulated" / "npu"), str(TESTS.parent)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "npu"}


def run_npu_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """Call ``ranks.run_ranks`` in the driver; the function itself creates the process group."""
    outcomes = npu_outcomes(function, world_size, *arguments, timeout=timeout)
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.value for outcome in outcomes]


def npu_outcomes(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Outcome]:
    """Call ``ranks.rank_outcomes`` in the driver."""
    driver = _start_driver()
    assert driver.stdin is not None, "the driver reads jobs"
    assert driver.stdout is not None, "the driver writes outcomes"
    # The first run waits for the imports of the server, and may wait for a compiler.
    watch = threading.Timer(timeout + 400, driver.kill)
    watch.start()
    try:
        pickle.dump(pickle.dumps((function, world_size, arguments, timeout)), driver.stdin)
        driver.stdin.flush()
        outcomes: list[Outcome] = pickle.load(driver.stdout)
    except BaseException:
        # A late answer would be read as the answer to the next job.
        driver.kill()
        driver.wait()
        raise
    finally:
        watch.cancel()
    return outcomes


def _start_driver() -> subprocess.Popen[bytes]:
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
    """Run jobs from standard input until it ends."""
    from tests import ranks

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with answers
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
