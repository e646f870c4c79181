"""Run scripts under ``accelerate launch`` on local CPU ranks, with and without zerostart's line."""

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.processes import run_command

EXAMPLES = Path(__file__).parents[2] / "examples" / "adoption"
CONFIGS = {name: EXAMPLES / f"accelerate_config_{name}.yaml" for name in ("zero3", "zero2", "fsdp2")}
#: The line that a user adds to a script.
LINE = "import zerostart; zerostart.enable()"
#: Text in transformers' log of each load by zerostart.
ANNOUNCED = "zerostart loads the weights in shards"
#: Enables accelerate's own FSDP2 on CPUs, where each rank would train by itself.
REHEARSAL = (
    "from zerostart.upstream.accelerate.preparing import AcceleratorPatches; "
    "AcceleratorPatches(lambda model: False, lambda accelerator, model: None).open()"
)


def add_line(script: str, line: str) -> str:
    """Insert ``line`` after the script's docstring and future imports."""
    lines = script.splitlines(keepends=True)
    for node in ast.parse(script).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not docstring and not future:
            return "".join([*lines[: node.lineno - 1], line + "\n", *lines[node.lineno - 1 :]])
    raise AssertionError("the script does nothing")


def remove_line(script: str) -> str:
    """Return one of our examples without zerostart."""
    stock, count = re.subn(r"^import zerostart\n\nzerostart\.enable\(\).*\n", "", script, flags=re.MULTILINE)
    assert count == 1
    return stock


def launch(
    script: str,
    folder: Path,
    config: Path,
    arguments: Sequence[str],
    paths: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float = 240,
    processes: int = 2,
    module: str | None = None,
    options: Sequence[str] = ("--mixed_precision", "no"),
) -> str:
    """Run ``script`` on local ranks in ``folder``; return its output, or raise AssertionError.

    With ``module``, launch that, with the script as first argument. ``options`` are passed to accelerate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", str(processes), "--main_process_port", "0", *options]
    command += [*(("-m", module) if module else ()), str(folder / "script.py"), *arguments]
    variables = {
        **os.environ,
        "TRANSFORMERS_VERBOSITY": "info",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    variables.update(environment or {})
    return run_command(command, folder, variables, paths=paths, seconds=timeout, name="the script")


def losses_of(output: str) -> list[float]:
    """Parse the losses that our accelerate example prints."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", output, flags=re.MULTILINE)]


def write_tokenizer(folder: Path, words: int = 80) -> None:
    """Write a tokenizer of ``words`` words next to a tiny model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, words)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=64
    ).save_pretrained(folder)
