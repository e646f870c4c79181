"""Reading the configuration of ``zerostart train``: one YAML file, with no key that is silently ignored.

``load_config(path, ["train.steps=10"])`` reads the file, applies the overrides and checks everything
before a model or a process group exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationError, model_validator

from zerostart.checkpoint.storage.files import read_small
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ReadError
from zerostart.training.config.mistakes import TaskMistake, told
from zerostart.training.config.parsing import MOST_TEXT, parsed_yaml
from zerostart.training.config.registry import task_class
from zerostart.training.config.sections import TaskConfig
from zerostart.training.config.train import TrainConfig
from zerostart.training.config.trained_rules import check_trained

#: Sections that one value stands for, that of this key.
_SHORT = {"resume": "path"}


def _of_task(value: object) -> object:
    """The section ``task``, as the task's own settings."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return value  # which the section itself refuses, if it is none
    try:
        settings = task_class(name).Settings
    except ConfigError as error:
        problem = {"loc": ("name",), "type": "value_error", "msg": str(error), "input": name}
        raise TaskMistake([problem], TaskConfig) from None
    try:
        return settings.model_validate(value)
    except ValidationError as error:
        raise TaskMistake(error.errors(), settings) from None


class _CheckedConfig(TrainConfig):
    """A configuration whose task is known by name, and whose sections agree with each other."""

    task: SerializeAsAny[Annotated[TaskConfig, BeforeValidator(_of_task)]]

    @model_validator(mode="after")
    def _compatible(self) -> _CheckedConfig:
        engine, precision = self.engine.chosen(), self.train.mixed_precision
        if precision not in engine.precisions:
            raise ValueError(
                f"train.mixed_precision {precision} is not available with engine.name {engine.name}; use "
                f"{' or '.join(engine.precisions)}"
            )
        kept = self.kept_dtype
        if kept is not None and self.model.dtype not in (None, kept):
            raise ValueError(
                f"model.dtype {self.model.dtype} contradicts train.mixed_precision {precision}: "
                f"{engine.title} keeps the model in {kept} there"
            )
        if self.model.dtype == "float16" and engine.steps_parameters:
            raise ValueError(
                f"model.dtype float16 is not available with engine.name {engine.name}, which scales no "
                f"loss, so "
                "that small gradients would be zero; use bfloat16"
            )
        check_trained(self)
        self._check_task()
        return self

    def _check_task(self) -> None:
        """Whether the task can be run with what else is configured. Raises ValueError."""
        task, name = task_class(self.task.name), self.task.name
        for section in self.of_tasks:
            given = getattr(self, section, None) is not None
            if section in task.needs and not given:
                raise ValueError(f"{section} is required with task.name {name}")
            if given and section not in task.sections:
                taken = ", ".join(one for one in self.of_tasks if one in task.sections) or "none of these"
                raise ValueError(
                    f"the section {section} is not for task.name {name}, which takes {taken}; leave it out"
                )
        if self.engine.sequence_parallel > 1 and not task.shares_sequences:
            raise ValueError(
                f"engine.sequence_parallel {self.engine.sequence_parallel} is not available with task.name "
                f"{name}: ranks share sequences whose tokens look back alone; leave it out"
            )
        task.check(self)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in the YAML file ``path``, with each ``dotted.key=value`` override applied.

    A value is read as YAML, so that ``train.steps=10`` is a number. Raises :class:`ConfigError`, naming
    the key and the nearest valid one.
    """
    try:
        text = read_small(str(path), 4 * MOST_TEXT, "configuration").decode("utf-8")
    except (CheckpointError, CheckpointNotFoundError, ReadError) as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text: {error.reason}") from error
    values = parsed_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of sections, not {type(values).__name__}")
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, where=str(path))


def parse_config(values: dict[str, Any], where: str = "configuration") -> TrainConfig:
    """``values`` (plain nested dictionaries) as a checked configuration; raises :class:`ConfigError`."""
    try:
        return _CheckedConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(told(error, TrainConfig))}") from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"an override is KEY=VALUE with a dotted key, such as train.steps=10, not {override!r}"
        )
    section = values
    *parents, leaf = key.split(".")
    value = parsed_yaml(text, f"override {override!r}")
    if key in _SHORT and isinstance(value, str) and isinstance(section.get(key), dict):
        section, leaf = section[key], _SHORT[key]
    for parent in parents:
        inner = section.setdefault(parent, {})
        if parent in _SHORT and (inner is None or isinstance(inner, str)):
            inner = section[parent] = {} if inner is None else {_SHORT[parent]: inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        section = inner
    section[leaf] = value
