"""Work that is done again and again in a process of its own, and killed at one of its requests to a store."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from tests.stores import proxy

#: After what a test imports and defines (``work``): does it once for each line, in a fork, so that nothing is
#: loaded again; prints the fork's id, then what it ended with.
_LOOP = """
import os, sys
for line in sys.stdin:
    endpoint, which = line.split()
    child = os.fork()
    if child == 0:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        code = 1
        try:
            work(which)
            code = 0
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Worker:
    """A process that calls ``work`` in forks of itself."""

    def __init__(self, process: "subprocess.Popen[str]", endpoint: str) -> None:
        self._process, self._endpoint = process, endpoint

    def done(self, which: str = "-") -> bool:
        """Whether the work comes to its end, undisturbed."""
        return self._begun(self._endpoint, which)[1]() == 0

    def killed(self, at: int, which: str = "-") -> bool:
        """Kill the work at request number ``at``, after which none arrives; false where it had fewer."""
        pid: list[int] = []

        def fault(method: str, path: str, number: int) -> proxy.Fault:
            if number < at:
                return None
            if number == at and pid:
                os.kill(pid[0], signal.SIGKILL)
            return "dead"

        with proxy.before(proxy.Proxy(self._endpoint, 0.0, 0.0, fault)) as line:
            line.latency = 0.02  # so that the id of the process is known before its first request
            child, wait = self._begun(line.address, which)
            pid.append(child)
            return wait() != 0

    def _begun(self, through: str, which: str) -> tuple[int, Callable[[], int]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{through} {which}\n")
        stdin.flush()
        return int(stdout.readline()), lambda: int(stdout.readline())


@contextlib.contextmanager
def worker(program: str, arguments: list[str], endpoint: str) -> Iterator[Worker]:
    """A worker whose ``program`` defines ``work(which)``; ``arguments`` are in its ``sys.argv``."""
    with subprocess.Popen(
        [sys.executable, "-c", program + _LOOP, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Worker(process, endpoint)
        finally:
            assert process.stdin is not None
            process.stdin.close()
