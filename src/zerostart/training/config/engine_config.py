"""The configuration that the engine gets: complete, with nothing left to its defaults that matters here."""

from __future__ import annotations

import copy
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.engines.training import TrainingJob
from zerostart.errors import ConfigError
from zerostart.training.config.parsing import parsed_json
from zerostart.training.config.train import TrainConfig


def engine_config(config: TrainConfig, world_size: int, hidden_size: int | None) -> dict[str, Any]:
    """What ``zerostart.load`` gets as ``engine_config``; raises :class:`ConfigError`."""
    train = config.train
    job = TrainingJob(
        config.precision,
        train.batch_size,
        train.accumulation,
        train.max_grad_norm,
        world_size,
        hidden_size,
        config.engine.sequence_parallel,
    )
    engine = config.engine.chosen()
    complete = engine.training_config(job, own_config(config))
    sharing = engine.configured_tensor_parallel(complete)
    if sharing > 1:
        raise ConfigError(
            f"engine.config has {sharing} ranks share tensors, which is not available in a run: it would "
            "evaluate and count as if each had a batch of its own; leave it out, or use zerostart.load in a "
            "script"
        )
    return complete


def own_config(config: TrainConfig) -> dict[str, Any]:
    """The user's ``engine.config``, read from its file if it names one; raises :class:`ConfigError`."""
    given = config.engine.config
    if isinstance(given, dict):
        return copy.deepcopy(given)
    try:
        text = expanded(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.config {given} is not a readable JSON file: {error}") from error
    loaded = parsed_json(text, f"engine.config {given}")
    if not isinstance(loaded, dict):
        raise ConfigError(f"engine.config {given} is not a JSON object")
    return loaded
