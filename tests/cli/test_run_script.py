"""``zerostart run``: a script sees what it would see under ``python``, and is told what was taken over."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ZEROSTART = [sys.executable, "-m", "zerostart"]
SEES = '''
"""The documentation of a script."""
import json, multiprocessing, pickle, sys


class Local:
    pass


def told(queue):
    queue.put([__name__, __file__, sys.argv])


if __name__ == "__main__":
    child_saw = None
    if "alone" not in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=told, args=(queue,))
        child.start()
        child_saw = queue.get(timeout=60)
        child.join()
    spec = None if __spec__ is None else [__spec__.name, __spec__.origin]
    seen = {
        "main": [__name__, __file__, __package__, spec, __doc__, sorted(vars()), type(__loader__).__name__],
        "system": [sys.argv, sys.path[0], sys.modules["__main__"].__file__],
        "local": pickle.loads(pickle.dumps(Local)) is Local,
        "child": child_saw,
    }
    print(json.dumps(seen))
    if "die" in sys.argv:
        raise ValueError("no good")
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    sys.exit(7)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scripts")
    (made / "package").mkdir()
    for name in ("script.py", "package/__init__.py", "package/__main__.py", "package/module.py"):
        (made / name).write_text("" if name.endswith("__init__.py") else SEES)
    (made / "broken.py").write_text("def f(:\n    pass\n")
    with zipfile.ZipFile(made / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SEES)
    return made


def outcome(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def without_notices(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("zerostart run: "))


def seen(text: str, folder: Path) -> object:
    """What a script sees, but for its loader and how runpy spells ``__package__`` and the first argument."""
    if not text:
        return None
    told = json.loads(text)
    name, file, package, spec, doc, names, _ = told["main"]
    names = [name for name in names if name != "__annotations__"]
    told["main"] = [name, file, package or None, spec, doc, names]
    for argv in (told["system"][0], *([told["child"][2]] if told["child"] else [])):
        argv[0] = str(folder / argv[0])
    return told


CASES = [
    pytest.param(["script.py", "--lr", "3", "-m", "x"]),
    pytest.param(["-m", "package.module", "die", "--engine", "none"], marks=pytest.mark.slow),
    pytest.param(["-m", "package", "alone", "--help"], marks=pytest.mark.slow),  # children do not import it
    pytest.param(["script.py", "alone", "interrupt"], marks=pytest.mark.slow),
    pytest.param(["broken.py"], marks=pytest.mark.slow),
    pytest.param(["package", "alone"], marks=pytest.mark.slow),
    pytest.param(["archive.zip", "alone", "--lr", "3"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_a_script_sees_what_it_sees_under_python(arguments: list[str], folder: Path) -> None:
    expected = outcome([sys.executable, *arguments], folder)
    found = outcome([*ZEROSTART, *arguments], folder)
    assert found.returncode == expected.returncode != 0
    assert seen(found.stdout, folder) == seen(expected.stdout, folder)
    # The traceback begins in the script (of a module, where python's own runpy calls it).
    own = without_notices(found.stderr)
    assert own == expected.stderr or (
        arguments[0] == "-m" and own.splitlines()[-1:] == ["ValueError: no good"]
    )
    assert "zerostart" not in own
    assert "nothing was taken over: the script loaded no model" in found.stderr


LOADS = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
print(type(model.lm_head.weight).__name__)
"""


@pytest.mark.slow
def test_options_before_the_name_and_a_word_of_what_was_taken_over(checkpoints, folder: Path) -> None:
    (folder / "loads.py").write_text(LOADS)
    source = str(checkpoints("qwen3"))
    found = outcome([*ZEROSTART, "--engine", "fsdp2", "--no-progress", "loads.py", source], folder)
    assert (found.returncode, found.stdout) == (0, "DTensor\n"), found.stderr
    assert "zerostart run: Qwen3ForCausalLM loaded in shards: FSDP2 on 1 ranks" in found.stderr
    assert "nothing was taken over" not in found.stderr
    # Left to transformers, as no engine is set up; as the command of torchrun.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "zerostart"]
    found = outcome([*command, "loads.py", source], folder)
    assert (found.returncode, found.stdout) == (0, "Parameter\n" * 2), found.stderr
    assert found.stderr.count("nothing was taken over: no sharding was set up when Qwen3ForCausalLM") == 1
