"""One call of transformers' ``from_pretrained``, or of ``from_config``, whose model starts in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart import engines
from zerostart.checkpoint.source import Files
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import EngineSetup
from zerostart.integrations.loading import InterceptedLoad
from zerostart.integrations.transformers.parallel_arguments import take_parallel_arguments
from zerostart.live.model import record_of
from zerostart.loading.arguments import EnabledArguments
from zerostart.loading.run import run
from zerostart.models import Built, build_fresh, library_of
from zerostart.upstream.seam import Findings
from zerostart.upstream.transformers.quantizers import dequantise, dequantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEVICE_MAP = "the ranks share the model out by themselves"


class _TransformersCall(InterceptedLoad):
    """A call that may ask for axes of its own, in transformers' words."""

    def __init__(
        self,
        settings: EnabledArguments,
        setup: EngineSetup,
        arguments: Mapping[str, Any],
        on_loaded: Callable[[nn.Module, str], None],
    ) -> None:
        super().__init__(settings, setup, arguments, on_loaded)
        # Taken out of the arguments: transformers would cut the model a second time.
        self._parallel = take_parallel_arguments(self.arguments, current_world().size)
        self._settings = self._parallel.over(settings)
        if _names_the_host(self.arguments.get("device_map")):
            del self.arguments["device_map"]


class TransformersLoad(_TransformersCall):
    """``from_pretrained``; see ``upstream.transformers.loading.TransformersCall``."""

    refused: Mapping[str, str] = {
        "device_map": _DEVICE_MAP,
        "gguf_file": "its conversions calculate on whole tensors; convert it to safetensors first",
        "max_memory": "it belongs to device_map",
        "offload_folder": "it belongs to device_map",
        "offload_buffers": "it belongs to device_map",
    }

    def check(self) -> None:
        """As ``InterceptedLoad.check``, and for weights that are to be quantised."""
        super().check()
        quantization = self.arguments.get("quantization_config")
        if quantization is not None and not _dequantises(quantization):
            raise ConfigError(
                "from_pretrained(quantization_config=...) is not available under zerostart.enabled(): "
                "weights are sharded as they train, and quantised ones are not trained. Leave it out: a "
                "checkpoint that is quantised is dequantised on the way"
            )

    def load(
        self,
        model: PreTrainedModel,
        files: list[str] | None,
        state_dict: Mapping[str, torch.Tensor] | None,
        config: Any,
    ) -> Findings:
        """Load, collectively, by transformers' rules for what is missing, unexpected or mismatched.

        Raises ConfigError for a device or a quantisation that cannot be, and what ``zerostart.load`` raises.
        """
        if config.device_map is not None:
            raise ConfigError(
                f"a device is set for the model ({config.device_map}), by torch.set_default_device or "
                f"`with torch.device(...)`, which zerostart.enabled() cannot honour: {_DEVICE_MAP}"
            )
        self._setup.sequences.check(model)
        quantizer = self._quantizer(config)
        self._parallel.plan(model)
        named = model.config.dtype
        source = (
            state_dict if state_dict is not None else Files(tuple(files or ()), model.config.name_or_path)
        )
        dtype = self._setup.dtype or self._dtype
        built = Built(model, self._log, dtype, True, library_of(model), quantizer)
        converter = None if quantizer is not None else config.weight_mapping
        findings = self._load(source, built, converter, config.ignore_mismatched_sizes)
        # The configuration names the dtype that was asked for, whatever the engine trains in.
        model.config.dtype = named
        self._parallel.show(model, record_of(model).engine.mesh.expert_parallel)
        self._on_loaded(model, self.setup)
        return findings

    def dequantising(self, config: object) -> None:
        """Have a quantised checkpoint of that configuration dequantised, though nobody has asked for it.

        Raises BuildError for a method that transformers cannot dequantise while it loads.
        """
        dequantise(config)

    def _quantizer(self, config: Any) -> Any:
        """zerostart's own dequantisation, in the place of transformers' for the same checkpoint."""
        if config.hf_quantizer is None:
            return None
        quantization = config.hf_quantizer.quantization_config
        name = config.pretrained_model_name_or_path
        if self.arguments.get("key_mapping"):
            raise ConfigError("key_mapping with a quantised checkpoint is not available; use zerostart.load")
        return dequantizer(quantization.to_dict(), str(name))


class FromConfigLoad(_TransformersCall):
    """``from_config``: builds on meta, and has each rank initialise its shards."""

    function = "from_config"

    def start(self, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """The model that ``make`` builds, with the unsharded model's bits; collective.

        Raises what ``zerostart.load`` raises.
        """
        with engines.contexts_aside():
            built = build_fresh(make, None, self._setup.dtype)
        model: PreTrainedModel = built.model
        self._setup.sequences.check(model)
        self._parallel.plan(model)
        named = model.config.dtype
        run(self._request(None, built, library_of(model).attention(model).obstacle))
        model.config.dtype = named
        self._parallel.show(model, record_of(model).engine.mesh.expert_parallel)
        self._on_loaded(model, self.setup)
        return model


def _names_the_host(device_map: object) -> bool:
    """Whether a device map puts all of a model on the host, where there is nothing else: no map at all."""
    if torch.accelerator.is_available() or device_map is None:
        return False
    if isinstance(device_map, Mapping):
        return bool(device_map) and all(str(device) == "cpu" for device in device_map.values())
    return str(device_map) in ("auto", "balanced", "balanced_low_0", "sequential", "cpu")


def _dequantises(quantization: object) -> bool:
    if isinstance(quantization, Mapping):
        return bool(quantization.get("dequantize"))
    return bool(getattr(quantization, "dequantize", False))
