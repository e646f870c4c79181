"""Common part of the loading calls that zerostart serves for the model libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart import engines
from zerostart.errors import ConfigError
from zerostart.integrations.barrier import library_call
from zerostart.integrations.engine_setup import EngineSetup
from zerostart.live.model import get_record
from zerostart.loading.request import Request
from zerostart.loading.run import run
from zerostart.models import Built, library_of
from zerostart.models.operator_log import OperatorLog
from zerostart.upstream.seam import Findings

if TYPE_CHECKING:
    from zerostart.loading.request import Converter, Source


class InterceptedLoad:
    """Build a model, load it, and agree with the other ranks; see ``upstream.seam.LoadingSeam``.

    ``setup`` is the engine setup, and ``settings`` are the other load settings. ``on_loaded`` is called with
    each loaded model and a description of its setup.
    """

    #: Unsupported arguments of the call, and the reasons.
    refused: Mapping[str, str] = {}
    function = "from_pretrained"

    def __init__(
        self,
        settings: Request,
        setup: EngineSetup,
        arguments: Mapping[str, Any],
        on_loaded: Callable[[nn.Module, str], None],
    ) -> None:
        self._setup = setup
        self._settings = settings
        self._on_loaded = on_loaded
        self.arguments = dict(arguments)
        self._log = OperatorLog()
        self._dtype = torch.get_default_dtype()
        self.model: Any = None

    @property
    def setup(self) -> str:
        """Description of the engine setup."""
        return self._setup.title

    def check(self) -> None:
        """Raise ConfigError for an argument that a sharded load does not support."""
        for name, reason in self.refused.items():
            if self.arguments.get(name):
                raise ConfigError(
                    f"{self.function}({name}=...) is not available under zerostart.enabled(): {reason}. "
                    "Leave it out, or call it outside"
                )

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[None]]:
        """Return the default dtype during the build, and a context for it.

        Buffers are computed in that dtype: that of ``zero.Init``, or the requested one.
        """
        self._dtype = self._setup.building_dtype or dtype
        return self._dtype, self._logged()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        # Suspend an open zero.Init: the model is built on the meta device, and the load shards it. The log
        # records the constructor's operators, which initialise tensors that the checkpoint lacks.
        with engines.suspended_contexts(), self._log:
            yield

    def agreeing(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all ranks, for the whole call."""
        return library_call(self.function)

    def _load(self, source: Source, built: Built, converter: Converter, ignore_mismatched: bool) -> Findings:
        obstacle = library_of(built.model).attention(built.model).obstacle
        request = replace(
            self._request(source, built, obstacle),
            converter=converter,
            strict=False,
            reinitialise_mismatched=ignore_mismatched,
        )
        run(request)
        report = get_record(built.model).report
        return (
            set(report.missing) - report.reinitialised.keys(),
            set(report.unexpected),
            {(name, have, want) for name, (have, want) in report.reinitialised.items()},
        )

    def _request(self, source: Source, model: Any, obstacle: str) -> Request:
        settings, setup = self._settings, self._setup
        return replace(
            settings,
            source=source,
            model=model,
            engine=setup.engine,
            engine_reason=setup.reason,
            zero_stage=setup.zero_stage,
            engine_config=setup.config,
            sequence_parallel=setup.sequences.without(obstacle).size,
        )
