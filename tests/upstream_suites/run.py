"""DeepSpeed's own tests, stock and with zerostart's construction under them.

    python tests/upstream_suites/run.py PATH-OF-A-DEEPSPEED-CHECKOUT [SUITE ...] [-k EXPRESSION] [--out FILE]

Those of ZeRO stages 1 and 2; where they are named, also files of ``AXES``: on tensors and sequences that
ranks share, and on leaf modules; and of ``CHECKPOINT``: on saving and resuming, by the engine itself or, with
``--saving``, by what ``zerostart.enable()`` puts in its place. Of the checkout only ``tests`` is used: the
engine is the installed one, so the two should be of one version.
Both runs are compared test by test. Exits 1 where one that passes with stock does not pass with zerostart.
"""

from __future__ import annotations

import argparse
import collections
import json
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
#: Files on what ranks share, and on leaf modules: engines at every stage.
AXES = {
    "model_parallelism/test_autotp_training.py": "",
    "model_parallelism/test_autotp_custom_patterns.py": "",
    "model_parallelism/test_tp_plan_e2e.py": "",
    "runtime/zero/test_zero_leaf_module.py": "",
    "sequence_parallelism/test_ulysses.py": "",
    "ulysses_alst/test_ulysses_sp_hf.py": "",
}
#: Files on saving and resuming.
CHECKPOINT = {
    "checkpoint/test_latest_checkpoint.py": "",
    "checkpoint/test_lr_scheduler.py": "",
    "checkpoint/test_moe_checkpoint.py": "",
    "checkpoint/test_other_optimizer.py": "",
    "checkpoint/test_shared_weights.py": "",
    "checkpoint/test_sparse.py": "",
    "checkpoint/test_tag_validation.py": "",
    "checkpoint/test_universal_checkpoint.py": "",
    "checkpoint/test_zero_optimizer.py": "",
}
#: The model that some of them ask the hub for.
HUB_MODEL = "hf-internal-testing/tiny-random-LlamaForCausalLM"
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
    parser.add_argument("--saving", action="store_true", help="checkpoints are zerostart's as well")
    parser.add_argument("--out", type=Path, help="takes the outcomes, as JSON, beside those of other tests")
    arguments = parser.parse_args()
    if not (arguments.checkout / "tests" / "unit" / "common.py").is_file():
        parser.error(f"{arguments.checkout} has no tests/unit/common.py; give a checkout of DeepSpeed")
    bad, outcomes_of = 0, {}
    if arguments.out and arguments.out.exists():
        outcomes_of = json.loads(arguments.out.read_text())
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        # Apart from the rest of the checkout, whose package would come before the installed one.
        shutil.copytree(arguments.checkout / "tests", Path(scratch, "tests"))
        make_hub_model(Path(scratch, "hub"))
        os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
        # Not by the tests: each would wait without end for the lock of a build that was killed.
        load_operations(("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"))
        for suite in arguments.suites:
            expression = arguments.k or SUITES.get(suite, "")
            stock, _ = outcomes(Path(scratch), suite, expression, ours=False)
            ours, made = outcomes(Path(scratch), suite, expression, ours=True, saving=arguments.saving)
            bad += told(suite, stock, ours, made)
            known = outcomes_of.setdefault(suite, {"constructions": 0, "stock, zerostart": {}})
            known["constructions"] += made
            known["stock, zerostart"] |= {name: [stock[name], ours.get(name)] for name in stock}
            if arguments.out:
                arguments.out.write_text(json.dumps(outcomes_of, indent=1) + "\n")
    return 1 if bad else 0


def make_hub_model(hub: Path) -> None:
    """Leave a tiny model of random weights in the hub's cache, under the name that the tests ask for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    made = hub / f"models--{HUB_MODEL.replace('/', '--')}"
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))
    model.save_pretrained(made / "snapshots" / "0")
    (made / "refs").mkdir()
    (made / "refs" / "main").write_text("0")


def outcomes(
    scratch: Path, suite: str, expression: str, ours: bool, saving: bool = False
) -> tuple[dict[str, str], int]:
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
        "ZEROSTART_STAGES": "0123" if suite in {*AXES, *CHECKPOINT} else "12",
        "ZEROSTART_SAVING": "1" if saving else "",
        "HF_HUB_CACHE": str(scratch / "hub"),
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
