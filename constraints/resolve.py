"""``make constraints``: what pip installs beside each torch that is known, for ``pip install -c``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from zerostart.upstream.versions import TORCH

HERE = Path(__file__).parent
EXTRAS = "deepspeed,diffusers,media,peft,stores"
#: Libraries of accelerators, which each torch pins itself, as far as its build needs them.
PINNED = ("cuda-", "nvidia-", "triton")
HEADER = """\
# pip install -c constraints/torch-{minor}.txt "zerostart[deepspeed]"
# What pip installs with the extras {extras} beside torch {minor}; `make constraints` writes it.
# Libraries of accelerators are not listed: torch pins those of its build.
"""


def resolved(minor: str, arguments: list[str]) -> dict[str, str]:
    """Versions by name, of everything that would be installed in an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        wanted = [f"{HERE.parent}[{EXTRAS}]", f"torch=={minor}.*"]
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *arguments, *wanted], check=True)
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): Version(one["metadata"]["version"]).public
        for one in installed
    }


def main() -> None:
    """Write a file for each torch."""
    for number in range(TORCH.first[1], TORCH.before[1]):
        minor = f"{TORCH.first[0]}.{number}"
        versions = resolved(minor, sys.argv[1:])
        listed = sorted(name for name in versions if name != "zerostart" and not name.startswith(PINNED))
        lines = [f"{name}=={versions[name]}\n" for name in listed]
        text = HEADER.format(minor=minor, extras=EXTRAS.replace(",", ", ")) + "".join(lines)
        (HERE / f"torch-{minor}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
