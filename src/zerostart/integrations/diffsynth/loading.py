"""One call of DiffSynth's ``load_model``, and so one model of a pipeline, that zerostart loads in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart import engines
from zerostart.checkpoint.formats.torch_zip import read_torch_file
from zerostart.checkpoint.source import Files
from zerostart.errors import ConfigError
from zerostart.integrations.loading import InterceptedLoad
from zerostart.loading.run import run

if TYPE_CHECKING:
    from zerostart.loading.request import Source

#: Under these DiffSynth looks for a torch file's weights, where it has nothing else.
_UNWRAPPED = ("state_dict", "module", "model_state")


class DiffSynthLoad(InterceptedLoad):
    """By DiffSynth's rules: every weight in the one dtype, and none missing or too much.

    Weights are never read as a whole, so ``use_disk_map`` says nothing new; where shards lie the engine says,
    and not ``device``. ``vram_config`` and ``vram_limit`` belong to a ``module_map``.
    """

    refused: Mapping[str, str] = {
        "module_map": "it moves whole weights between devices and dtypes, and those of a shard are on other "
        "ranks (it comes from --fp8_models, or from a ModelConfig with offload_dtype and offload_device; "
        "ZeRO-2 takes it, and offload_device='disk' is taken everywhere)",
        "quantize": "quantised weights are whole on every rank, as ZeRO-2 has them",
    }
    function = "load_model"

    @property
    def _left_to_diffsynth(self) -> bool:
        """Whether weights are kept in DiffSynth's way: whole on every rank as here, or on disk alone."""
        given = self.arguments
        if given["module_map"] is None and given["quantize"] is None:
            return False
        on_disk = given["quantize"] is None and given["vram_config"]["offload_device"] == "disk"
        return self._setup.whole or on_disk

    def check(self) -> None:
        """As ``InterceptedLoad.check``, where weights are to be in shards."""
        if not self._left_to_diffsynth:
            super().check()

    def load_model(self, original: Callable[[], nn.Module]) -> nn.Module:
        """Build and load, collectively; ``original`` does where weights are kept in DiffSynth's own way.

        Raises ConfigError for arguments that cannot be honoured, CoverageError for weights that are missing
        or too much, and what ``zerostart.load`` raises besides.
        """
        if self._left_to_diffsynth:
            with engines.contexts_aside():
                return original()
        given, setup = self.arguments, self._setup
        asked: torch.dtype | None = given["torch_dtype"]
        # DeepSpeed trains what it gets; accelerate's FSDP2 fp32 copies, wherever the precision is mixed.
        dtype = asked if setup.family.owns_optimizer else setup.dtype or asked
        kind, config = given["model_class"], given["config"] or {}

        def build() -> nn.Module:
            made: nn.Module = kind(**config)
            return made if dtype is None else _without_integers(made, dtype)

        # Errors name the model by the name of what builds it.
        build.__name__ = kind.__name__
        with self.agreeing():
            request = replace(
                self._request(self._source(), build, "attention that zerostart knows nothing of"),
                dtype=dtype,
                converter=given["state_dict_converter"],
            )
            model = run(request)
            # Parameters are read in their dtype; buffers are computed in the default one, and cast last, as
            # DiffSynth's model.to(dtype=...) does.
            if asked is not None:
                _cast_buffers(model, asked)
        self._on_loaded(model, self.setup)
        return model

    def _source(self) -> Source:
        state_dict, path = self.arguments["state_dict"], self.arguments["path"]
        if state_dict is not None:
            if not isinstance(state_dict, Mapping):
                raise ConfigError(
                    f"load_model(state_dict=...) is a {type(state_dict).__name__}, which zerostart.enabled() "
                    "does not read; pass a dict of tensors, or the path of the file"
                )
            return state_dict
        paths = [path] if isinstance(path, str) else list(path)
        return Files(tuple(map(str, paths)), ", ".join(map(str, paths)))


def _without_integers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` with its integer parameters (a count of batches) in ``dtype``, in which they are read too."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (parameter.is_floating_point() or parameter.is_complex()):
                module._parameters[name] = nn.Parameter(parameter.data.to(dtype), requires_grad=False)
    return model


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """What ``model.to(dtype=...)`` does to buffers, whose values are computed in the default dtype."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() or buffer.is_complex():
                module._buffers[name] = buffer.to(dtype)


def keys_of_torch_file(path: str) -> dict[str, Any]:
    """Names and shapes of a torch file's tensors, nested as DiffSynth finds them; reads its headers alone.

    Raises CheckpointError and ReadError as a load does.
    """
    entries, notes, _ = read_torch_file(path)
    found = {entry.name: list(entry.shape) for entry in entries}
    wrapper = notes.get("state_dict")
    return found if wrapper is None or wrapper in _UNWRAPPED else {wrapper: found}
