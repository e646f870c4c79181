"""One call of diffusers' ``from_pretrained`` whose weights zerostart loads in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from zerostart.checkpoint.source import Files
from zerostart.errors import ConfigError
from zerostart.integrations.loading import InterceptedLoad
from zerostart.models import Built, library_of
from zerostart.upstream.seam import Findings
from zerostart.upstream.transformers.models import without_weights

if TYPE_CHECKING:
    from diffusers import ModelMixin


class DiffusersLoad(InterceptedLoad):
    """By diffusers' rules: what is missing is initialised by the model's own constructor."""

    refused: Mapping[str, str] = {
        "device_map": "the ranks share the model out by themselves",
        "max_memory": "it belongs to device_map",
        "offload_folder": "it belongs to device_map",
        "offload_state_dict": "it belongs to device_map",
        "parallel_config": "the mesh is the engine's",
        "use_flashpack": "the weights are read from safetensors and torch files",
        "quantization_config": "weights are sharded as they train, and quantised ones are not trained",
    }

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[None]]:
        """Buffers are computed in the default dtype, which diffusers sets to the one asked for."""
        self._dtype = dtype
        return dtype, self._on_meta(dtype)

    @contextlib.contextmanager
    def _on_meta(self, dtype: torch.dtype) -> Iterator[None]:
        with without_weights(dtype), self._logged():
            yield

    def load(self, model: ModelMixin, files: list[str], name: object, options: Mapping[str, Any]) -> Findings:
        """Load, collectively, the checkpoint ``name`` with the ``options`` that diffusers read it with.

        Raises ConfigError for quantised weights, and what ``zerostart.load`` raises.
        """
        if options.get("hf_quantizer") is not None:
            raise ConfigError(
                f"{name} is quantised, and quantised weights cannot be trained; load weights that are "
                "not quantised"
            )
        built = Built(model, self._log, self._setup.dtype or options.get("dtype"), True, library_of(model))
        source = Files(tuple(files), str(name))
        findings = self._load(source, built, None, bool(options.get("ignore_mismatched_sizes")))
        self._on_loaded(model, self.setup)
        return findings
