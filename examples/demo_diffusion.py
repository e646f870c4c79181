"""The demo of diffusion models: train one on real pictures, and use the result without zerostart.

Each step is one command, shown before it runs, that can be repeated and changed by hand.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="deepspeed", choices=["deepspeed", "fsdp2"])
    parser.add_argument("--out", default="out/demo-diffusion")
    options = parser.parse_args()
    config, out = str(HERE / "demo_diffusion.yaml"), options.out
    overrides = [
        f"model.source={out}/pipeline",
        f"media.source={out}/pictures/metadata.csv",
        f"cache.directory={out}/cache",
        f"engine.name={options.engine}",
        f"output.directory={out}/run",
    ]
    commands = [
        ["python", str(HERE / "digits_pipeline.py"), out],
        ["zerostart", "cache", "--nproc", "2", config, *overrides],
        ["zerostart", "train", "--nproc", "2", config, *overrides],
        ["python", str(HERE / "check_demo_diffusion.py"), config, *overrides],
    ]
    for command in commands:
        print(f"\n$ {shlex.join(command)}", flush=True)
        code = run(command)
        if code != 0:
            return code
    return 0


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
