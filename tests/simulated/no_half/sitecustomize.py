"""A machine whose DeepSpeed accelerator has neither fp16 nor bf16: put this folder on PYTHONPATH.

Python imports this module at its start, in every process. The accelerator's class is changed when DeepSpeed
imports it. DeepSpeed itself then refuses such configurations.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Finder:
    """Finds the one module as Python does, and changes it once it is executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if not name.endswith("accelerator.cpu_accelerator"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None, f"{name} is where it was"
        assert spec.loader is not None, f"{name} can be loaded"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import torch

            execute(module)
            kind = module.CPU_Accelerator
            kind.is_fp16_supported = kind.is_bf16_supported = lambda self: False
            kind.supported_dtypes = lambda self: [torch.float]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)
