"""Test ``zerostart run``: scripts run like under ``python``, with a notice at the end."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ZEROSTART = [sys.executable, "-m", "zerostart"]
SCRIPT = '''
"""The documentation of a script."""
import json, multiprocessing, pickle, sys


class Local:
    pass


def report(queue):
    queue.put([__name__, __file__, sys.argv])


if __name__ == "__main__":
    child_report = None
    if "no-child" not in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=report, args=(queue,))
        child.start()
        child_report = queue.get(timeout=60)
        child.join()
    spec = None if __spec__ is None else [__spec__.name, __spec__.origin]
    environment = {
        "main": [__name__, __file__, __package__, spec, __doc__, sorted(vars()), type(__loader__).__name__],
        "system": [sys.argv, sys.path[0], sys.modules["__main__"].__file__],
        "local": pickle.loads(pickle.dumps(Local)) is Local,
        "child": child_report,
    }
    print(json.dumps(environment))
    if "die" in sys.argv:
        raise ValueError("no good")
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    sys.exit(7)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scripts")
    (root / "package").mkdir()
    for name in ("script.py", "package/__init__.py", "package/__main__.py", "package/module.py"):
        (root / name).write_text("" if name.endswith("__init__.py") else SCRIPT)
    (root / "broken.py").write_text("def f(:\n    pass\n")
    with zipfile.ZipFile(root / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SCRIPT)
    return root


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def without_notices(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("zerostart run: "))


def normalised(text: str, folder: Path) -> object:
    """Parse a script's report, without its loader and runpy's spelling of some values."""
    if not text:
        return None
    report = json.loads(text)
    name, file, package, spec, doc, names, _ = report["main"]
    names = [name for name in names if name != "__annotations__"]
    report["main"] = [name, file, package or None, spec, doc, names]
    for argv in (report["system"][0], *([report["child"][2]] if report["child"] else [])):
        argv[0] = str(folder / argv[0])
    return report


CASES = [
    pytest.param(["script.py", "--lr", "3", "-m", "x"]),
    pytest.param(["-m", "package.module", "die", "--engine", "none"], marks=pytest.mark.slow),
    pytest.param(
        ["-m", "package", "no-child", "--help"], marks=pytest.mark.slow
    ),  # children do not import it
    pytest.param(["script.py", "no-child", "interrupt"], marks=pytest.mark.slow),
    pytest.param(["broken.py"], marks=pytest.mark.slow),
    pytest.param(["package", "no-child"], marks=pytest.mark.slow),
    pytest.param(["archive.zip", "no-child", "--lr", "3"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_a_script_runs_like_under_python(arguments: list[str], folder: Path) -> None:
    expected = run([sys.executable, *arguments], folder)
    actual = run([*ZEROSTART, *arguments], folder)
    assert actual.returncode == expected.returncode != 0
    assert normalised(actual.stdout, folder) == normalised(expected.stdout, folder)
    # The traceback begins in the script, for a module in runpy.
    stderr = without_notices(actual.stderr)
    assert stderr == expected.stderr or (
        arguments[0] == "-m" and stderr.splitlines()[-1:] == ["ValueError: no good"]
    )
    assert "zerostart" not in stderr
    assert "nothing was taken over: the script loaded no model" in actual.stderr


LOAD_SCRIPT = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
print(type(model.lm_head.weight).__name__)
"""


@pytest.mark.slow
def test_options_precede_the_script_and_loads_are_reported(checkpoints, folder: Path) -> None:
    (folder / "loads.py").write_text(LOAD_SCRIPT)
    source = str(checkpoints("qwen3"))
    result = run([*ZEROSTART, "--engine", "fsdp2", "--no-progress", "loads.py", source], folder)
    assert (result.returncode, result.stdout) == (0, "DTensor\n"), result.stderr
    assert "zerostart run: Qwen3ForCausalLM loaded in shards: FSDP2 on 1 ranks" in result.stderr
    assert "nothing was taken over" not in result.stderr
    # Under torchrun without an engine, transformers itself loads.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "zerostart"]
    result = run([*command, "loads.py", source], folder)
    assert (result.returncode, result.stdout) == (0, "Parameter\n" * 2), result.stderr
    assert result.stderr.count("nothing was taken over: no sharding was set up when Qwen3ForCausalLM") == 1
