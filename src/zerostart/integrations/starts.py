"""One call of transformers' ``from_config`` whose model starts in shards, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerostart import engines
from zerostart.integrations.pretrained import Call
from zerostart.live.record import record_of
from zerostart.loading.request import Request
from zerostart.loading.run import run
from zerostart.models import build_fresh, library_of


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
