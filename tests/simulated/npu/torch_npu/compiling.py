"""Compile the pretend accelerator, once for an environment."""

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

__all__ = ["load_extension"]

NAME = "pretend_npu"
_LOAD = """
import sys
from torch.utils.cpp_extension import load
load(sys.argv[1], sys.argv[3], build_directory=sys.argv[2], extra_cflags=["-O0", "-g0", "-w"])
"""
SOURCES = sorted(Path(__file__).with_name("csrc").iterdir())


def load_extension() -> Any:
    """Load the extension, and compile it first if needed."""
    library = _folder() / f"{NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process is killed
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None, f"{library} is no module"
    assert spec.loader is not None, f"{library} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    """Return a folder for these sources and this torch; checkouts may share an environment."""
    digest = hashlib.blake2b(f"{torch.__version__} {sys.version_info[:2]}".encode(), digest_size=8)
    for source in SOURCES:
        digest.update(source.read_bytes())
    return Path(sys.prefix, "torch_extensions", f"{NAME}_{digest.hexdigest()}")


def _compile(library: Path) -> None:
    """Compile in a subprocess, because this one may be importing torch."""
    folder = tempfile.mkdtemp(dir=library.parent)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # folder of ninja
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
