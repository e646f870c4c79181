"""DeepSpeed's own tests, stock and with zerostart's construction under them.

    python tests/upstream_suites/run.py PATH-OF-A-DEEPSPEED-CHECKOUT [SUITE ...] [-k EXPRESSION]

Those of ZeRO stages 1 and 2. Of the checkout only ``tests`` is used: the engine is the installed one, so the
two should be of one version.
Both runs are compared test by test. Exits 1 where one that passes with stock does not pass with zerostart.
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

#: Files of DeepSpeed's ``tests/unit`` that start engines at stages 1 and 2, and what to take of each.
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
HERE = Path(__file__).resolve().parent
#: Where DeepSpeed's operations are compiled, once for all runs.
EXTENSIONS = Path(sys.prefix, "torch_extensions")
#: Longest that one test, and one file, may take, in seconds.
LIMIT, LONGEST = 300, 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed, at the installed version")
    parser.add_argument("suites", nargs="*", default=list(SUITES), help="files under tests/unit")
    parser.add_argument("-k", default="", help="pytest's expression, in the place of the suite's own")
    arguments = parser.parse_args()
    if not (arguments.checkout / "tests" / "unit" / "common.py").is_file():
        parser.error(f"{arguments.checkout} has no tests/unit/common.py; give a checkout of DeepSpeed")
    bad = 0
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        # Apart from the rest of the checkout, whose package would come before the installed one.
        shutil.copytree(arguments.checkout / "tests", Path(scratch, "tests"))
        os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
        # Not by the tests: each would wait without end for the lock of a build that was killed.
        load_operations(("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"))
        for suite in arguments.suites:
            expression = arguments.k or SUITES.get(suite, "")
            stock, _ = outcomes(Path(scratch), suite, expression, ours=False)
            ours, made = outcomes(Path(scratch), suite, expression, ours=True)
            bad += told(suite, stock, ours, made)
    return 1 if bad else 0


def outcomes(scratch: Path, suite: str, expression: str, ours: bool) -> tuple[dict[str, str], int]:
    """What became of each test, by its name, and how many engines zerostart made."""
    found, log = scratch / "found.xml", scratch / "constructions"
    found.unlink(missing_ok=True)
    log.write_text("")
    environment = os.environ | {
        "LOCAL_SIZE": "4",  # DeepSpeed's number of CPU devices
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_UNITTEST_TIMEOUT": str(LIMIT),
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "ZEROSTART_CONSTRUCTIONS": str(log) if ours else "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-m", "pytest", f"unit/{suite}", "-p", "upstream_suites.construction"]
    command += ["-p", "no:cacheprovider", "-q", "--tb=short", f"--junitxml={found}"]
    command += ["-k", expression] if expression else []
    done = subprocess.run(
        command,
        cwd=scratch / "tests",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    if not found.exists():
        raise SystemExit(f"pytest wrote no result for {suite}:\n{done.stdout[-4000:]}")
    return read(found), len(log.read_text().splitlines())


def read(path: Path) -> dict[str, str]:
    """Of a JUnit file: ``passed``, ``skipped: WHY`` or ``failed: WHY`` by test."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = (
                    f"{'skipped' if child.tag == 'skipped' else 'failed'}: {_line(child.get('message'))}"
                )
        found[name] = outcome
    return found


def _line(message: str | None) -> str:
    return " ".join((message or "").split())[:200]


def told(suite: str, stock: dict[str, str], ours: dict[str, str], made: int) -> int:
    """Print the comparison of one suite; returns how many tests zerostart breaks."""
    kinds = [collections.Counter(o.partition(":")[0] for o in run.values()) for run in (stock, ours)]
    counts = "; ".join(
        f"{who} {kind['passed']} passed, {kind['failed']} failed, {kind['skipped']} skipped"
        for who, kind in zip(("stock", "zerostart"), kinds, strict=True)
    )
    print(f"{suite}: {counts}; {made} constructions", flush=True)
    broken = 0
    for name, outcome in stock.items():
        other = ours.get(name, "failed: did not run")
        if outcome.partition(":")[0] != other.partition(":")[0]:
            print(f"  {name}\n    stock {outcome}\n    zerostart {other}")
            broken += outcome == "passed"
        elif outcome.startswith("failed"):
            print(f"  {name}\n    both {outcome}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
