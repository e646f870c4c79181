"""transformers' own tests of loading under ZeRO-3: what passes without zerostart passes with it enabled.

They are run from the checkout that ``ZEROSTART_TRANSFORMERS`` names, of 5.6 or later.
"""

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DEEPSPEED = "tests/trainer/distributed/test_trainer_distributed_deepspeed.py"
SUITES = {
    "deepspeed": f"{DEEPSPEED}::TestNonTrainerIntegrationDeepSpeed",
    "conversions": "tests/utils/test_core_model_loading.py",
}
#: Tests that must be among those that pass: missing parameters, and the conversion of experts, under ZeRO-3.
NEEDED = {
    "deepspeed": {"test_init_zero3_missing_params", "test_init_zero3_moe_weight_conversion"},
    "conversions": {"test_moe_and_qkv_conversion"},
}


#: What fails with zerostart, and how: modules that a model keeps in fp32 stay so, which stock ZeRO-3 rounds.
DIFFERENT = {"test_init_zero3_fp16": r"\.wo\.weight has dtype torch\.float32, expected torch\.float16"}


def outcomes(checkout: Path, suite: str, how: str, folder: Path) -> dict[str, str]:
    """What became of each test: passed, skipped, or how it failed."""
    paths = [HERE / "suite", HERE.parents[1] / "src"]
    if importlib.util.find_spec("datasets") is None:
        paths.append(HERE / "shims")
    report = folder / f"{suite}-{how}.xml"
    command = [sys.executable, "-m", "pytest", "-p", "zerostart_suite", "-p", "no:cacheprovider", "-q"]
    command += ["--rootdir", str(checkout), "-c", os.devnull, f"--junit-xml={report}", SUITES[suite]]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, [*paths, checkout]), os.environ.get("PYTHONPATH", "")]),
        "ZEROSTART_SUITE": how,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=checkout, env=environment, timeout=280, capture_output=True, text=True, check=False
    )
    print(done.stdout[-6000:])
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        bad = [f"failed: {kinds[tag]}" for tag in ("failure", "error") if tag in kinds]
        found[case.attrib["name"]] = bad[0] if bad else "skipped" if "skipped" in kinds else "passed"
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", SUITES)
def test_what_passes_without_zerostart_passes_with_it(suite: str, tmp_path: Path) -> None:
    if "ZEROSTART_TRANSFORMERS" not in os.environ:
        pytest.skip("ZEROSTART_TRANSFORMERS names no checkout")
    checkout = Path(os.environ["ZEROSTART_TRANSFORMERS"])
    stock = outcomes(checkout, suite, "stock", tmp_path)
    ours = outcomes(checkout, suite, "ours", tmp_path)
    for name in stock:
        print(f"{name}: stock {stock[name]}, zerostart {ours.get(name)}")
    passed = {name for name, outcome in stock.items() if outcome == "passed"}
    assert passed >= NEEDED[suite]
    failed = {name: ours.get(name, "absent") for name in passed if ours.get(name) != "passed"}
    assert failed.keys() <= DIFFERENT.keys()
    for name, message in failed.items():
        assert re.search(DIFFERENT[name], message)
