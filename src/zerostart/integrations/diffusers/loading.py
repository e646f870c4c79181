"""One call of diffusers' ``from_pretrained`` whose weights zerostart loads in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerostart.checkpoint.source import Files
from zerostart.errors import ConfigError
from zerostart.integrations.transformers.loading import Call
from zerostart.integrations.transformers.parallel_arguments import Asked
from zerostart.models import Built, library_of
from zerostart.upstream.served import Findings
from zerostart.upstream.transformers.models import without_weights


class DiffusionCall(Call):
    """As ``Call``, by diffusers' rules: what is missing is initialised by the model's own constructor."""

    refused: Mapping[str, str] = {
        "device_map": "the ranks share the model out by themselves",
        "max_memory": "it belongs to device_map",
        "offload_folder": "it belongs to device_map",
        "offload_state_dict": "it belongs to device_map",
        "parallel_config": "the mesh is the engine's",
        "use_flashpack": "the weights are read from safetensors and torch files",
        "quantization_config": "weights are sharded as they train, and quantised ones are not trained",
    }

    def _take(self) -> Asked:
        """diffusers has no such arguments."""
        return Asked()

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[Any]]:
        """Buffers are computed in the default dtype, which diffusers sets to the one asked for."""
        self._dtype = dtype
        return dtype, self._on_meta(dtype)

    @contextlib.contextmanager
    def _on_meta(self, dtype: torch.dtype) -> Iterator[None]:
        with without_weights(dtype), self._logged():
            yield

    def load(self, model: Any, files: list[str] | None, state_dict: Any, config: Any) -> Findings:
        """Load, collectively; ``state_dict`` is the name of the checkpoint, ``config`` the call's options.

        Raises ConfigError for quantised weights, and what ``zerostart.load`` raises.
        """
        if config.get("hf_quantizer") is not None:
            raise ConfigError(
                f"{state_dict} is quantised, and quantised weights are not trained; load weights that are not"
            )
        asked = config.get("dtype")
        built = Built(model, self._log, self._active.dtype or asked, True, library_of(model))
        source = Files(tuple(files or ()), str(state_dict))
        return self._run(source, built, None, bool(config.get("ignore_mismatched_sizes")))
