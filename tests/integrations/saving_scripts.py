"""accelerate scripts that save and resume as documented, with or without zerostart's line."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.integrations.scripts import Data


class Loop:
    """A prepared training; ``adopt`` has the arguments of ``zerostart.enable``, None for stock."""

    def __init__(self, path: Path, environment: dict[str, str], adopt: dict[str, Any] | None) -> None:
        os.environ.update(environment)
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
        from transformers import AutoModelForCausalLM, set_seed

        if adopt is not None:
            import zerostart

            zerostart.enable(**adopt)
        elif "FSDP_VERSION" in environment:
            from zerostart.upstream.accelerate.preparing import AcceleratorPatches

            AcceleratorPatches(lambda model: False, lambda accelerator, model: None).open()
        handler = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=20))
        project = ProjectConfiguration(str(path.parent), automatic_checkpoint_naming=False)
        options = {"cpu": True} if "FSDP_VERSION" in environment else {}
        self.accelerator: Any = Accelerator(
            mixed_precision="no", kwargs_handlers=[handler], project_config=project, **options
        )
        set_seed(11)
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        loader: Any = torch.utils.data.DataLoader(Data(), batch_size=8 // self.accelerator.num_processes)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    @property
    def bare(self) -> Any:
        """Model before ``prepare``."""
        return self.accelerator.unwrap_model(self.model)

    def steps(self, count: int) -> list[float]:
        """Train ``count`` steps on the first batches; return their losses."""
        losses = []
        for _, batch in zip(range(count), self.loader, strict=False):
            loss = self.model(**batch, use_cache=False).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(self.accelerator.gather(loss.detach().reshape(1)).mean().item())
        return losses


def save_every_way(
    path: Path, out: Path, environment: dict[str, str], adopt: dict[str, Any] | None
) -> tuple[list[float], list[float]]:
    """Train, save in all ways, and train on; return the losses before and after."""
    loop = Loop(path, environment, adopt)
    accelerator, first = loop.accelerator, loop.steps(2)
    state = accelerator.get_state_dict(loop.model)
    main = accelerator.is_main_process
    # The documented call, on every rank.
    loop.bare.save_pretrained(out / "documented", is_main_process=main, state_dict=state)
    if main:  # a common call
        loop.bare.save_pretrained(out / "main", state_dict=state)
    accelerator.wait_for_everyone()
    if adopt is not None:
        loop.bare.save_pretrained(out / "cut", is_main_process=main, max_shard_size="100KB")
        loop.bare.save_pretrained(out / "over", max_shard_size="100KB")
        loop.bare.save_pretrained(out / "over")
        loop.bare.save_pretrained(out / "whole", save_function=accelerator.save)
    accelerator.save_model(loop.model, out / "model", max_shard_size="100KB")
    accelerator.save_state(str(out / "state"))
    return first, loop.steps(2)


def resume(path: Path, state: Path, environment: dict[str, str], adopt: dict[str, Any] | None) -> list[float]:
    """Continue from the saved state of another run."""
    loop = Loop(path, environment, adopt)
    loop.accelerator.load_state(str(state))
    return loop.steps(2)


def save_on_one_rank(path: Path, out: Path, environment: dict[str, str], waits: bool) -> float:
    """Call ``save_pretrained`` only on the main process; return the seconds until the error."""
    import time

    import pytest

    from zerostart.errors import ConfigError

    loop = Loop(path, environment, {})
    if loop.accelerator.is_main_process:
        start = time.monotonic()
        with pytest.raises(
            ConfigError, match="every rank holds a part of the model, so call it on every rank"
        ):
            loop.bare.save_pretrained(out)
        seconds = time.monotonic() - start
        assert not out.exists() or not list(out.iterdir())
    else:
        seconds = 0.0
    if waits:
        loop.accelerator.wait_for_everyone()
    return seconds
