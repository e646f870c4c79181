"""Test the local launcher with workers that do not import torch."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zerostart.cli.launch import run_local_ranks
from zerostart.errors import CoverageError, PeerError

PRELUDE = """
import os, signal, sys, time
from zerostart.cli.launch import worker_main
from zerostart.errors import CoverageError, PeerError
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def worker(tmp_path):
    """Function that writes a worker module, and returns its name and environment."""

    def write(body):
        function = "def run(argv):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        (tmp_path / "tiny_worker.py").write_text(f"{PRELUDE}\n{function}\n\nworker_main(run)\n")
        # The worker imports the same zerostart as this process.
        return "tiny_worker", {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    return write


def is_running(pid):
    """Return True for a running process, False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_and_environment(worker):
    module, env = worker("""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return [argv, [os.environ[name] for name in names], int(os.environ["OMP_NUM_THREADS"]) >= 1,
                "MASTER_PORT" in os.environ,
                os.stat(os.path.dirname(os.environ["ZEROSTART_STORE"])).st_mode & 0o077]
    """)
    results = run_local_ranks(module, ["a", "b"], 2, env=env)
    assert results == [[["a", "b"], [str(r), str(r), "2", "2"], True, False, 0] for r in range(2)]


def test_an_error_of_all_ranks_keeps_type_and_text(worker, capfd):
    module, env = worker('raise CoverageError("a.weight is missing")')
    with pytest.raises(CoverageError, match=r"(?m)^a\.weight is missing$"):
        run_local_ranks(module, [], 2, env=env)
    assert capfd.readouterr().err == ""


def test_the_cause_wins_over_peer_errors(worker):
    module, env = worker("""
        if rank == 0:
            raise PeerError("rank 1 left")
        time.sleep(0.3)
        raise CoverageError("the cause")
    """)
    with pytest.raises(CoverageError, match="the cause"):
        run_local_ranks(module, [], 2, env=env)


def test_a_killed_rank_is_named(worker):
    module, env = worker("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        raise PeerError("rank 1 stopped answering")
    """)
    with pytest.raises(PeerError, match=r"rank 1 was killed by signal 9 \(SIGKILL"):
        run_local_ranks(module, [], 2, env=env)


def test_foreign_error_and_silent_exit_are_named(worker, capfd):
    module, env = worker('raise KeyError("odd")')
    with pytest.raises(PeerError, match=r"rank [01] failed with KeyError: 'odd'"):
        run_local_ranks(module, [], 2, env=env)
    module, env = worker('print("last words", flush=True); os._exit(3 if rank else 0)')
    capfd.readouterr()
    with pytest.raises(PeerError, match="rank 1 exited with status 3 and without a report"):
        run_local_ranks(module, [], 2, env=env)
    assert capfd.readouterr().err == "[rank 1] last words\n"


LAUNCHER = """
import sys
from zerostart.cli.launch import run_local_ranks
print(run_local_ranks("tiny_worker", sys.argv[1:], 2), flush=True)
"""


def start_launcher(env, *argv):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *argv],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    return process, pids


CLEAN_STOP = """
    from pathlib import Path
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    Path(argv[0], str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        while len(list(Path(argv[0]).iterdir())) < 2:
            time.sleep(0.01)
        print(*(path.read_text() for path in Path(argv[0]).iterdir()), flush=True)
    while not seen:
        time.sleep(0.01)
    time.sleep(0.2)
    return len(seen)
"""


@pytest.mark.slow
def test_an_interrupt_is_forwarded_once_and_ranks_end_themselves(worker, tmp_path):
    _, env = worker(CLEAN_STOP)
    (tmp_path / "pids").mkdir()
    process, pids = start_launcher(env, str(tmp_path / "pids"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.strip()) == (0, "[1, 1]"), err
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher(worker, tmp_path):
    _, env = worker(CLEAN_STOP)
    (tmp_path / "pids").mkdir()
    process, pids = start_launcher(env, str(tmp_path / "pids"))
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)
