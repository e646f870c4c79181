"""One call of transformers' ``from_pretrained`` whose weights zerostart loads in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerostart import engines
from zerostart.checkpoint.source import Files
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError, ZerostartError
from zerostart.integrations.engine_setup import Active
from zerostart.integrations.transformers.parallel_arguments import Asked, take
from zerostart.live.record import record_of
from zerostart.loading.arguments import EnabledArguments
from zerostart.loading.request import Request
from zerostart.loading.run import run
from zerostart.models import Built, build_fresh, library_of
from zerostart.models.operator_log import OperatorLog
from zerostart.upstream.served import Findings
from zerostart.upstream.transformers.quantizers import dequantise, dequantizer

#: Arguments of transformers' ``from_pretrained`` that a sharded load cannot honour, and why.
REFUSED: Mapping[str, str] = {
    "device_map": "the ranks share the model out by themselves",
    "gguf_file": "its conversions calculate on whole tensors; convert it to safetensors first",
    "max_memory": "it belongs to device_map",
    "offload_folder": "it belongs to device_map",
    "offload_buffers": "it belongs to device_map",
}


class Call:
    """Builds, loads, and agrees with the other ranks; see ``transformers_loading.Served``."""

    #: Arguments that cannot be honoured, and why; and of what they are arguments.
    refused: Mapping[str, str] = REFUSED
    function = "from_pretrained"

    def __init__(self, settings: EnabledArguments, active: Active, arguments: Mapping[str, Any]) -> None:
        self._active = active
        self.arguments = dict(arguments)
        self._asked = self._take()
        self._settings = self._asked.over(settings)
        if _names_the_host(self.arguments.get("device_map")):
            del self.arguments["device_map"]
        self._log = OperatorLog()
        self._dtype = torch.get_default_dtype()
        self.model: Any = None

    def _take(self) -> Asked:
        """The parallel axes that the call asks for, no longer among its arguments."""
        return take(self.arguments, current_world().size)

    @property
    def setup(self) -> str:
        """What the model is loaded for, in words."""
        return self._active.title

    def check(self) -> None:
        """Raise ConfigError, by its name, for an argument that a sharded load cannot honour."""
        for name, reason in self.refused.items():
            if self.arguments.get(name):
                raise ConfigError(
                    f"{self.function}({name}=...) is not available under zerostart.enabled(): {reason}. "
                    "Leave it out, or call it outside"
                )
        quantization = self.arguments.get("quantization_config")
        if quantization is not None and not _dequantises(quantization):
            raise ConfigError(
                "from_pretrained(quantization_config=...) is not available under zerostart.enabled(): "
                "weights are sharded as they train, and quantised ones are not trained. Leave it out: a "
                "checkpoint that is quantised is dequantised on the way"
            )

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[Any]]:
        """Buffers are computed in the dtype of the model: that of ``zero.Init``, or the one asked for."""
        self._dtype = self._active.building or dtype
        return self._dtype, self._logged()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        with engines.contexts_aside(), self._log:
            yield

    def load(self, model: Any, files: list[str] | None, state_dict: Any, config: Any) -> Findings:
        """Load, collectively, by transformers' rules for what is missing, unexpected or mismatched.

        Raises ConfigError for a device or a quantisation that cannot be, and what ``zerostart.load`` raises.
        """
        if config.device_map is not None:
            raise ConfigError(
                f"a device is set for the model ({config.device_map}), by torch.set_default_device or "
                "`with torch.device(...)`, which zerostart.enabled() cannot honour: "
                f"{REFUSED['device_map']}"
            )
        self._active.sharing.check(model)
        quantizer = self._quantizer(config)
        self._asked.plan(model)
        named = model.config.dtype
        source = (
            state_dict if state_dict is not None else Files(tuple(files or ()), model.config.name_or_path)
        )
        dtype = self._active.dtype or self._dtype
        built = Built(model, self._log, dtype, True, library_of(model), quantizer)
        converter = None if quantizer is not None else config.weight_mapping
        found = self._run(source, built, converter, config.ignore_mismatched_sizes)
        # The configuration names the dtype that was asked for, whatever the engine trains in.
        model.config.dtype = named
        self._asked.show(model, record_of(model).engine.mesh.expert_parallel)
        return found

    def _run(self, source: Any, built: Built, converter: Any, ignore_mismatched: bool) -> Findings:
        """Load; what has another shape is mismatched where that is to be ignored, and else an error."""
        obstacle = library_of(built.model).attention(built.model).obstacle
        given = {**self._given(obstacle), "strict": False, "reinitialise_mismatched": ignore_mismatched}
        run(Request(source, model=built, converter=converter, **given))
        made = record_of(built.model).report
        return (
            set(made.missing) - made.reinitialised.keys(),
            set(made.unexpected),
            {(name, have, want) for name, (have, want) in made.reinitialised.items()},
        )

    def _given(self, obstacle: str) -> dict[str, Any]:
        """The arguments of a load that do not come from the call.

        ``obstacle`` is why ranks cannot share sequences of the model, "" where they can.
        """
        active = self._active
        return {
            **vars(self._settings),
            "engine": active.engine,
            "zero_stage": active.zero_stage,
            "engine_config": active.config,
            "sequence_parallel": active.sharing.unless(obstacle).size,
        }

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around the whole call: what fails on one rank is raised on all."""
        try:
            with current_world().phase(self.function):
                yield
        except ZerostartError as agreed:
            # Where all ranks failed alike, the caller gets the library's own error.
            own = agreed.__cause__
            if isinstance(own, Exception) and str(agreed) == f"{type(own).__name__}: {own}":
                raise own from own.__cause__
            raise

    def dequantising(self, config: Any) -> None:
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


def _names_the_host(device_map: Any) -> bool:
    """Whether a device map puts all of a model on the host, where there is nothing else: no map at all."""
    if torch.accelerator.is_available() or device_map is None:
        return False
    if isinstance(device_map, Mapping):
        return bool(device_map) and all(str(place) == "cpu" for place in device_map.values())
    return str(device_map) in ("auto", "balanced", "balanced_low_0", "sequential", "cpu")


def _dequantises(quantization: Any) -> bool:
    if isinstance(quantization, Mapping):
        return bool(quantization.get("dequantize"))
    return bool(getattr(quantization, "dequantize", False))


class Start(Call):
    """Builds on meta, and has each rank initialise its shards; see ``transformers_loading.Starting``."""

    refused: Mapping[str, str] = {}
    function = "from_config"

    def start(self, make: Callable[[], Any]) -> Any:
        """The model that ``make`` builds, with the unsharded model's bits; collective.

        Raises what ``zerostart.load`` raises.
        """
        with engines.contexts_aside():
            built = build_fresh(make, None, self._active.dtype)
        model: Any = built.model
        self._active.sharing.check(model)
        self._asked.plan(model)
        obstacle, named = library_of(model).attention(model).obstacle, model.config.dtype
        run(Request(None, model=built, **self._given(obstacle)))
        model.config.dtype = named
        self._asked.show(model, record_of(model).engine.mesh.expert_parallel)
        return model
