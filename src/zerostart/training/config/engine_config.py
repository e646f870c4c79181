"""The engine's configuration of a run: the user's, and the run's own values.

It is complete: nothing that matters to a run is left to the engine's defaults.
"""

from __future__ import annotations

import copy
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.engines.training import TrainingJob
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import EngineConfig, TrainingConfig
from zerostart.training.config.parsing import parsed_json
from zerostart.upstream.accelerate.plugins import is_set, launched_dynamo, launched_precision


def engine_config(
    section: EngineConfig, train: TrainingConfig, precision: str, world_size: int, hidden_size: int | None
) -> dict[str, Any]:
    """What ``zerostart.load`` gets as ``engine_config``; raises :class:`ConfigError`."""
    job = TrainingJob(
        precision, train.batch_size, train.accumulation, train.max_grad_norm, world_size, hidden_size
    )
    engine = section.chosen()
    complete = engine.training_config(job, user_config(section))
    # Asked of the whole, since the user's own file is one of the places that may say so.
    sharing = engine.configured_tensor_parallel(complete)
    if sharing > 1:
        raise ConfigError(
            f"engine.config has {sharing} ranks share tensors, which zerostart train does not "
            "support: it would count and evaluate as if each rank had a batch of its own; leave "
            "it out, or use zerostart.load in a script"
        )
    return complete


def user_config(engine: EngineConfig) -> dict[str, Any]:
    """The user's ``engine.config``, read from its file if it names one; raises :class:`ConfigError`."""
    given = engine.config
    if isinstance(given, dict):
        # A copy: the configuration itself stays as it was read.
        return copy.deepcopy(given)
    try:
        text = expanded(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.config {given} is not a readable JSON file: {error}") from error
    loaded = parsed_json(text, f"engine.config {given}")
    if not isinstance(loaded, dict):
        raise ConfigError(f"engine.config {given} is not a JSON object")
    return loaded


#: What accelerate's launcher sets for what it would set up besides ranks.
_SET_UP = (
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"),
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def check_launcher(mixed_precision: str) -> None:
    """Raise :class:`ConfigError` if ``accelerate launch`` has set up more than the ranks of the run."""
    if (backend := launched_dynamo()) != "no":
        raise ConfigError(
            f"the launcher's configuration has dynamo_backend: {backend}, but zerostart train does "
            "not compile models; leave it out of the launcher's configuration"
        )
    if found := [name for name in _SET_UP if is_set(name)]:
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
