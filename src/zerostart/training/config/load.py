"""Read the configuration of ``zerostart train``: one YAML file, without unknown keys.

``load_config(path, ["train.steps=10"])`` reads the file, applies the overrides and checks everything before a
model or a process group exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError, model_validator

from zerostart.checkpoint.storage.files import read_small
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ReadError
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.parsing import MAX_CHARACTERS, parse_yaml
from zerostart.training.loop.task import task_class


class _CheckedConfig(TrainConfig):
    """A configuration whose sections agree with each other."""

    @model_validator(mode="after")
    def _check_sections(self) -> _CheckedConfig:
        _check_precision(self)
        _check_held_out(self)
        _check_output(self)
        task, name = task_class(self.task.name), self.task.name
        for section in self.per_task:
            if getattr(self, section, None) is not None and section not in task.sections:
                accepted = ", ".join(one for one in self.per_task if one in task.sections) or "none of these"
                raise ValueError(
                    f"the section {section} is not for task.name {name}, which takes {accepted}; leave it out"
                )
        task.check(self)
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read the YAML file ``path`` and apply each ``dotted.key=value`` override, whose value is YAML.

    Raises ConfigError that names the key and the nearest valid one.
    """
    try:
        text = read_small(str(path), 4 * MAX_CHARACTERS, "configuration").decode("utf-8")
    except (CheckpointError, CheckpointNotFoundError, ReadError) as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text: {error.reason}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of sections, not {type(values).__name__}")
    # Before anything is checked: an override may supply a missing key or correct a wrong one.
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, where=str(path))


def parse_config(values: dict[str, Any], where: str = "configuration") -> TrainConfig:
    """Check ``values`` (plain nested dictionaries); raises ConfigError."""
    task = values.get("task")
    if isinstance(task, dict) and isinstance(name := task.get("name"), str):
        try:
            settings = task_class(name).Settings
        except ConfigError as error:
            raise ConfigError(f"{where}: task.name: {error}") from None
        values = {**values, "task": _validated(settings, task, f"{where}: ", "task.")}
    checked: TrainConfig = _validated(_CheckedConfig, values, f"{where}: ", "")
    return checked


def _validated(kind: type[BaseModel], values: dict[str, Any], where: str, before: str) -> Any:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem), kind, before) for problem in error.errors())
        raise ConfigError(f"{where}{problems}") from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"an override has the form KEY=VALUE with a dotted key, such as train.steps=10, not {override!r}"
        )
    section = values
    *parents, leaf = key.split(".")
    value = parse_yaml(text, f"override {override!r}")
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        section = inner
    section[leaf] = value


def _explain(problem: dict[str, Any], root: type[BaseModel], before: str) -> str:
    location = [str(part) for part in problem["loc"]]
    key = before + ".".join(location)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _fields(location[:-1], root), n=1, cutoff=0.5)
        hint = f"; did you mean {before}{'.'.join([*location[:-1], near[0]])}?" if near else ""
        return f"unknown key {key}{hint}"
    if problem["type"] == "missing":
        return f"{key} is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    value = repr(problem["input"])
    # A section is too long to show, and some messages have the value already.
    suffix = "" if isinstance(problem["input"], dict) or value in message else f", not {value}"
    return f"{key}: {message}{suffix}"


def _fields(location: Sequence[str], section: type[BaseModel]) -> list[str]:
    for part in location:
        if part.isdecimal():  # an entry of a list of sections
            continue
        annotation = section.model_fields[part].annotation
        kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)


def _check_precision(config: TrainConfig) -> None:
    """Raise ValueError for types in which the engine does not train."""
    engine, precision = config.engine.chosen(), config.train.mixed_precision
    if precision not in engine.precisions:
        raise ValueError(
            f"train.mixed_precision {precision} is not available with engine.name {engine.name}; use "
            f"{' or '.join(engine.precisions)}"
        )
    engine_dtype = config.engine_dtype
    if engine_dtype is not None and config.model.dtype not in (None, engine_dtype):
        raise ValueError(
            f"model.dtype {config.model.dtype} contradicts train.mixed_precision {precision}: "
            f"{engine.title} keeps the model in {engine_dtype} there"
        )
    if config.model.dtype == "float16" and engine.steps_parameters:
        raise ValueError(
            f"model.dtype float16 is not available with engine.name {engine.name}, which does not "
            "scale the loss, so small gradients would become zero; use bfloat16"
        )


def _check_held_out(config: TrainConfig) -> None:
    """Raise ValueError if a held-out loss is asked for but nothing is held out."""
    saved, measured = config.checkpoint.every, config.train.evaluate_every
    if config.checkpoint.best and not (saved and measured and saved % measured == 0):
        raise ValueError(
            "checkpoint.best compares held-out losses: hold examples out (task.held_out), and make "
            "checkpoint.every a multiple of train.evaluate_every"
        )
    uses = {
        "checkpoint.best": config.checkpoint.best,
        "train.evaluate_every": measured,
        "ema.evaluate": config.ema is not None and config.ema.evaluate,
    }
    # A task without the key may hold examples out by itself.
    if not getattr(config.task, "held_out", True) and (keys := [key for key, value in uses.items() if value]):
        raise ValueError(
            f"{keys[0]} needs held-out examples, but there are none: set task.held_out, or leave it out"
        )


def _check_output(config: TrainConfig) -> None:
    """Raise ValueError for contradictions between training, averages, samples and output."""
    output, adapted, merge = config.output, config.lora is not None, config.output.merge
    part = adapted or output.trainable_only or output.format == "diffsynth"
    partial = output.format is not None or output.trainable_only
    contradictions = {
        "train.trainable and lora exclude each other: leave one of them out": adapted
        and config.train.trainable,
        "output.merge merges a LoRA, but there is no section lora: leave it out": merge and not adapted,
        "output.merge is not available with ema, which saves averaged adapters: leave one of them out": (
            merge and config.ema
        ),
        "samples.with_ema: the run has no averaged weights; add the section ema, or leave it out": (
            config.samples and config.samples.with_ema and not config.ema
        ),
        "output.format peft is for adapters, and there is no section lora: leave it out": (
            output.format == "peft" and not adapted
        ),
        "output.merge saves a whole model: leave output.format and trainable_only out": merge and partial,
        "output.pipeline needs a whole model: set output.merge, or leave output.pipeline out": (
            output.pipeline and not merge and part
        ),
        "output.remove_prefix is for files of trained tensors: set output.trainable_only": (
            output.remove_prefix and (merge or not part)
        ),
    }
    for message, found in contradictions.items():
        if found:
            raise ValueError(message)
