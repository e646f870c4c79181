"""The complete engine configuration of a run: the user's, and the run's own values."""

from __future__ import annotations

import copy
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.engines.training import TrainingJob
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import EngineConfig, TrainingConfig
from zerostart.training.config.parsing import parse_json
from zerostart.upstream.accelerate.plugins import is_set, launched_precision

#: Variables by which accelerate's launcher sets up more than ranks.
_LAUNCHER_VARIABLES = (
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"),
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def engine_config(
    section: EngineConfig, train: TrainingConfig, precision: str, world_size: int, hidden_size: int | None
) -> dict[str, Any]:
    """Return the ``engine_config`` for ``zerostart.load``; raises ConfigError."""
    job = TrainingJob(
        precision, train.batch_size, train.accumulation, train.max_grad_norm, world_size, hidden_size
    )
    engine = section.chosen()
    complete = engine.training_config(job, user_config(section))
    sharing = engine.configured_tensor_parallel(complete)
    if sharing > 1:
        raise ConfigError(
            f"engine.config has {sharing} ranks share tensors, which zerostart train does not "
            "support: it would count and evaluate as if each rank had a batch of its own; leave "
            "it out, or use zerostart.load in a script"
        )
    return complete


def user_config(engine: EngineConfig) -> dict[str, Any]:
    """Return the user's ``engine.config``, read from its file if it names one; raises ConfigError."""
    value = engine.config
    if isinstance(value, dict):
        return copy.deepcopy(value)
    try:
        loaded = parse_json(expanded(value).read_text(encoding="utf-8"), f"engine.config {value}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.config {value} is not a readable JSON file: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"engine.config {value} is not a JSON object")
    return loaded


def check_launcher(mixed_precision: str) -> None:
    """Raise ConfigError if ``accelerate launch`` has set up more than ranks."""
    if found := [name for name in _LAUNCHER_VARIABLES if is_set(name)]:
        raise ConfigError(
            f"accelerate launch has set {found[0]}, which zerostart train does not read; write the engine in "
            "the section engine of the configuration, and start it with a plain multi-process accelerate "
            "configuration, with torchrun, or with --nproc"
        )
    precision = launched_precision()
    if precision not in ("no", mixed_precision):
        raise ConfigError(
            f"the launcher's configuration has mixed_precision: {precision}, but this run's configuration "
            f"has train.mixed_precision: {mixed_precision}; leave it out of the launcher's"
        )
