"""DiffSynth's pipelines in fp32, which its scripts have in bf16: for comparisons to more digits."""

import types
from types import ModuleType
from typing import Any

import torch

#: The modules that are patched, once they are imported; of Z-Image's transformer a line has bf16 as it is.
PATCHED = ("diffsynth.diffusion.base_pipeline", "diffsynth.models.z_image_dit")


def in_fp32(module: ModuleType) -> None:
    """Have ``module``, one of ``PATCHED``, calculate in fp32; for a process that ends with its test."""
    if not hasattr(module, "BasePipeline"):
        module.torch = types.SimpleNamespace(**{**vars(torch), "bfloat16": torch.float32})
        return
    original = module.BasePipeline.__init__

    def begin(self: Any, *arguments: Any, **given: Any) -> None:
        original(self, *arguments, **{**given, "torch_dtype": torch.float32})

    module.BasePipeline.__init__ = begin
