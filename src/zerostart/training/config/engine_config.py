"""The engine's configuration of a run: the user's, the launcher's, and the run's own values.

It is complete: nothing that matters to a run is left to the engine's defaults. The launcher's file may repeat
the run's configuration, or fill in what that leaves open; where the two differ the run does not start, for
nobody can know which of them was meant.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.engines.training import LauncherSetup, TrainingJob
from zerostart.errors import ConfigError, EngineError
from zerostart.training.config.configuration import EngineConfig, TrainConfig
from zerostart.training.config.parsing import parsed_json
from zerostart.upstream.accelerate.launched import launched_dynamo, launched_for, launched_precision


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
    complete = engine.training_config(job, user_config(config.engine))
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


#: What the launcher sets for each engine that it knows.
_ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
_PLAIN = "start it with a plain multi-process accelerate configuration, with torchrun, or with --nproc"


def with_launcher(config: TrainConfig) -> TrainConfig:
    """``config`` with what ``accelerate launch`` has set up; as it is where that is nothing.

    Raises :class:`EngineError` where another engine is set up, or ranks share what the configuration does not
    know of; :class:`ConfigError` where the launcher and the configuration say different things, or it wants
    what no run does.
    """
    if launched_for("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise EngineError(
            "ACCELERATE_USE_PARALLELISM_CONFIG=true, but in this run engine.sequence_parallel "
            "says which ranks share sequences; start it with a plain multi-process accelerate "
            "configuration"
        )
    if (backend := launched_dynamo()) != "no":
        raise ConfigError(
            f"the launcher's configuration has dynamo_backend: {backend}, but zerostart train does "
            "not compile models; leave it out of the launcher's configuration"
        )
    engine = config.engine.chosen()
    others = [name for name in _ENGINES if launched_for(name) and name != engine.launcher_variable]
    if others:
        raise EngineError(
            f"{others[0]}=true, but this run shards with {engine.title}; choose the launcher's engine in "
            f"engine.name, or {_PLAIN}"
        )
    set_up = engine.launcher_variable is not None and launched_for(engine.launcher_variable)
    launched = engine.launcher_setup() if set_up else LauncherSetup()
    agreed = dict(launched.agreed)
    if (precision := launched_precision()) != "no":
        # What the launcher's engine says itself comes first.
        agreed.setdefault("train.mixed_precision", ("mixed_precision", precision))
    for key, (word, value) in agreed.items():
        own = attrgetter(key)(config)
        if own != value:
            raise ConfigError(
                f"the launcher's configuration has {word}: {value}, but this run's configuration has "
                f"{key}: {own}; write the same value in both, or leave it out of the launcher's"
            )
    if not launched.config:
        return config
    merged = _merged(user_config(config.engine), launched.config, "engine.config")
    return config.model_copy(update={"engine": config.engine.model_copy(update={"config": merged})})


def _merged(own: Mapping[str, object], launched: Mapping[str, object], where: str) -> dict[str, object]:
    merged = dict(own)
    for key, value in launched.items():
        # "auto", like a key that is missing, is for the other side to fill in.
        there = merged.get(key, "auto")
        if isinstance(there, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(there, value, f"{where}.{key}")
        elif there == "auto":
            merged[key] = value
        elif value not in ("auto", there):
            raise ConfigError(
                f"{where}.{key} is {there!r}, but the launcher's configuration makes it {value!r}; "
                "write the same value in both, or leave it out of one"
            )
    return merged
