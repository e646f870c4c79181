"""Run DeepSpeed's own tests with stock models and with models loaded by zerostart.

    python tests/upstream_suites/run.py PATH-OF-A-DEEPSPEED-CHECKOUT [SUITE ...] [-k EXPRESSION]

Covers ZeRO stages 1 and 2. The engine is the installed one, so the checkout should have the same version.
Compares the two runs test by test. Exits 1 if a test passes with stock models only.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from zerostart.upstream.deepspeed.zero3_partitions import load_operations

#: Files of DeepSpeed's ``tests/unit`` that start engines at stages 1 and 2, with pytest expressions.
SUITES = {
    "v1/zero/test_zero.py": "not Zero3 and not ParamPartitioning",
    "v1/zero/test_stage2_flatten_on_gpu.py": "",
    "v1/zero/test_zero2_offload_multi_backward.py": "",
    "v1/zero/test_zero_cpu_offload_grad_accum.py": "",
    "v1/zero/test_zero_coalesce_grad_reduction.py": "",
    "v1/zero/test_zero_hook_count_regression.py": "",
    "v1/half_precision/test_bf16.py": "",
    "runtime/zero/test_ignore_unused_parameters.py": "",
    "runtime/zero/test_zero_grad_clip.py": "",
    "runtime/zero/test_zero_tensor_fragment.py": "not nvme and not 3-",
}
FOLDER = Path(__file__).resolve().parent
#: Folder of DeepSpeed's compiled operations, for all runs.
EXTENSIONS = Path(sys.prefix, "torch_extensions")
#: Timeouts in seconds.
TEST_TIMEOUT_S, FILE_TIMEOUT_S = 300, 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed, at the installed version")
    parser.add_argument("suites", nargs="*", default=list(SUITES), help="files under tests/unit")
    parser.add_argument("-k", default="", help="pytest's expression, replaces the suite's own")
    arguments = parser.parse_args()
    if not (arguments.checkout / "tests" / "unit" / "common.py").is_file():
        parser.error(f"{arguments.checkout} has no tests/unit/common.py; give a checkout of DeepSpeed")
    broken = 0
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        # Without the checkout's package, which would hide the installed one.
        shutil.copytree(arguments.checkout / "tests", Path(scratch, "tests"))
        os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
        # The tests themselves would wait forever for the lock of a killed build.
        load_operations(("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"))
        for suite in arguments.suites:
            expression = arguments.k or SUITES.get(suite, "")
            stock, _ = outcomes(Path(scratch), suite, expression, ours=False)
            ours, engines = outcomes(Path(scratch), suite, expression, ours=True)
            broken += print_comparison(suite, stock, ours, engines)
    return 1 if broken else 0


def outcomes(scratch: Path, suite: str, expression: str, ours: bool) -> tuple[dict[str, str], int]:
    """Return each test's outcome by name, and the number of models that zerostart loaded."""
    report, log = scratch / "found.xml", scratch / "constructions"
    report.unlink(missing_ok=True)
    log.write_text("")
    environment = os.environ | {
        "LOCAL_SIZE": "4",  # DeepSpeed's number of CPU devices
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_UNITTEST_TIMEOUT": str(TEST_TIMEOUT_S),
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "ZEROSTART_CONSTRUCTIONS": str(log) if ours else "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(FOLDER.parent), str(FOLDER.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-m", "pytest", f"unit/{suite}", "-p", "upstream_suites.construction"]
    command += ["-p", "no:cacheprovider", "-q", "--tb=short", f"--junitxml={report}"]
    command += ["-k", expression] if expression else []
    result = subprocess.run(
        command,
        cwd=scratch / "tests",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FILE_TIMEOUT_S,
        check=False,
    )
    if not report.exists():
        raise SystemExit(f"pytest wrote no result for {suite}:\n{result.stdout[-4000:]}")
    return read(report), len(log.read_text().splitlines())


def read(path: Path) -> dict[str, str]:
    """Return ``passed``, ``skipped: WHY`` or ``failed: WHY`` by test from a JUnit file."""
    outcomes_by_test = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = (
                    f"{'skipped' if child.tag == 'skipped' else 'failed'}: {_line(child.get('message'))}"
                )
        outcomes_by_test[name] = outcome
    return outcomes_by_test


def _line(message: str | None) -> str:
    return " ".join((message or "").split())[:200]


def print_comparison(suite: str, stock: dict[str, str], ours: dict[str, str], engines: int) -> int:
    """Print the comparison of one suite; return the number of broken tests."""
    kinds = [collections.Counter(o.partition(":")[0] for o in run.values()) for run in (stock, ours)]
    counts = "; ".join(
        f"{who} {kind['passed']} passed, {kind['failed']} failed, {kind['skipped']} skipped"
        for who, kind in zip(("stock", "zerostart"), kinds, strict=True)
    )
    print(f"{suite}: {counts}; {engines} constructions", flush=True)
    broken = 0
    for name, outcome in stock.items():
        our_outcome = ours.get(name, "failed: did not run")
        if outcome.partition(":")[0] != our_outcome.partition(":")[0]:
            print(f"  {name}\n    stock {outcome}\n    zerostart {our_outcome}")
            broken += outcome == "passed"
        elif outcome.startswith("failed"):
            print(f"  {name}\n    both {outcome}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
