"""The compiled part of the pretend accelerator, made once an environment: beside what DeepSpeed compiles."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["compiled"]

NAME = "pretend_npu"
_LOAD = """
import sys
from torch.utils.cpp_extension import load
load(sys.argv[1], sys.argv[3], build_directory=sys.argv[2], extra_cflags=["-O0", "-g0", "-w"])
"""
SOURCES = sorted(Path(__file__).with_name("csrc").iterdir())


def compiled() -> Any:
    """The extension; compiled if nobody has."""
    library = _folder() / f"{NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process is killed
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None, f"{library} is a module"
    assert spec.loader is not None, f"{library} can be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    """One for each state of the sources and each torch: several checkouts may share an environment."""
    seen = hashlib.blake2b(f"{torch.__version__} {sys.version_info[:2]}".encode(), digest_size=8)
    for source in SOURCES:
        seen.update(source.read_bytes())
    return Path(sys.prefix, "torch_extensions", f"{NAME}_{seen.hexdigest()}")


def _compile(library: Path) -> None:
    """In a process of its own: this one may be in the middle of importing torch."""
    folder = tempfile.mkdtemp(dir=library.parent)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # where ninja is
    source = str(Path(__file__).with_name("csrc") / "all.cpp")
    try:
        subprocess.run(
            [sys.executable, "-c", _LOAD, NAME, folder, source],
            env={**os.environ, "PATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            check=True,
            timeout=400,
        )
        Path(folder, f"{NAME}.so").rename(library)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
