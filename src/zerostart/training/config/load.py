"""Reading the configuration of ``zerostart train``: one YAML file, with no key that is silently ignored.

``load_config(path, ["train.steps=10"])`` reads the file, applies the overrides and checks everything
before a model or a process group exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, SerializeAsAny, ValidationError, model_validator

from zerostart.checkpoint.storage.files import read_small
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ReadError
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.parsing import MOST_TEXT, parsed_yaml
from zerostart.training.config.sections import Section, TaskConfig
from zerostart.training.loop.task import task_class


def _of_task(value: object) -> object:
    """The section ``task``, as the task's own settings."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return value  # which the section itself refuses, if it is none
    try:
        # The task's own module is imported here, for a name of a class of one's own as well.
        settings = task_class(name).Settings
    except ConfigError as error:
        problem = {"loc": ("name",), "type": "value_error", "msg": str(error), "input": name}
        # Wrapped: pydantic would make one text of all that is wrong in the section.
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
        # After all sections by themselves: here each has the types that it says.
        engine, precision = self.engine.chosen(), self.train.mixed_precision
        if precision not in engine.precisions:
            raise ValueError(
                f"train.mixed_precision {precision} is not available with engine.name {engine.name}; use "
                f"{' or '.join(engine.precisions)}"
            )
        kept = self.engine_dtype
        if kept is not None and self.model.dtype not in (None, kept):
            raise ValueError(
                f"model.dtype {self.model.dtype} contradicts train.mixed_precision {precision}: "
                f"{engine.title} keeps the model in {kept} there"
            )
        if self.model.dtype == "float16" and engine.steps_parameters:
            raise ValueError(
                f"model.dtype float16 is not available with engine.name {engine.name}, which does not "
                "scale the loss, so small gradients would become zero; use bfloat16"
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
    # On what was read, before anything is checked: an override may supply what is missing, or mend it.
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, where=str(path))


def parse_config(values: dict[str, Any], where: str = "configuration") -> TrainConfig:
    """``values`` (plain nested dictionaries) as a checked configuration; raises :class:`ConfigError`."""
    try:
        return _CheckedConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(messages(error, TrainConfig))}") from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"an override has the form KEY=VALUE with a dotted key, such as train.steps=10, not {override!r}"
        )
    section = values
    *parents, leaf = key.split(".")
    value = parsed_yaml(text, f"override {override!r}")
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        section = inner
    section[leaf] = value


class TaskMistake(ValueError):
    """What is wrong within the section ``task``, as pydantic tells it, and the section's class."""

    def __init__(self, problems: Sequence[Any], settings: type[Section]) -> None:
        super().__init__("task")
        self.problems = problems
        self.settings = settings


def messages(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """Each mistake that ``error`` found in a ``root``; in the section ``task`` by the task's settings."""
    for problem in error.errors():
        inner = problem.get("ctx", {}).get("error")
        if not isinstance(inner, TaskMistake):
            yield _explain(dict(problem), root, TaskConfig)
            continue
        for one in inner.problems:
            yield _explain({**one, "loc": (*problem["loc"], *one["loc"])}, root, inner.settings)


def _explain(problem: dict[str, Any], root: type[BaseModel], task: type[Section]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _fields(location[:-1], root, task), n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*location[:-1], near[0]])}?" if near else ""
        return f"unknown key {key}{hint}"
    if problem["type"] == "missing":
        return f"{key} is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    value = repr(problem["input"])
    # A section is long, and some messages have the value already.
    given = "" if isinstance(problem["input"], dict) or value in message else f", not {value}"
    return f"{key}: {message}{given}"


def _fields(location: Sequence[str], root: type[BaseModel], task: type[Section]) -> list[str]:
    section = root
    for part in location:
        if part.isdecimal():  # one of a list of sections
            continue
        annotation = section.model_fields[part].annotation
        kinds = (task,) if annotation is TaskConfig else (annotation, *get_args(annotation))
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return []
        section = found[0]
    return list(section.model_fields)


def check_trained(config: TrainConfig) -> None:
    """Raise ValueError for sections that contradict each other in what is trained, averaged and saved."""
    output, lora = config.output, config.lora
    _check_best(config)
    _check_held_out(config)
    if lora is not None and config.train.trainable:
        raise ValueError(
            "train.trainable and lora exclude each other, since both say what is trained; leave "
            "one of them out"
        )
    if output.hub_private is not None and output.push_to_hub is None:
        raise ValueError("output.hub_private is of output.push_to_hub, which is not there; name a repository")
    if output.merge and lora is None:
        raise ValueError("output.merge merges a LoRA, but there is no section lora; leave it out")
    if output.merge and config.ema is not None:
        raise ValueError(
            "output.merge is not available with ema, because averaged adapters are saved as "
            "adapters; leave one of them out"
        )
    if output.format == "peft" and lora is None:
        raise ValueError("output.format peft is for adapters, and there is no section lora; leave it out")
    if output.merge and (output.format is not None or output.trainable_only):
        raise ValueError("output.merge saves a whole model; leave output.format and trainable_only out")
    part = lora is not None or output.trainable_only or output.format == "diffsynth"
    if output.pipeline and not output.merge and part:
        raise ValueError(
            "output.pipeline needs a whole model; set output.merge, or leave output.pipeline out"
        )
    if output.remove_prefix and (output.merge or not part):
        raise ValueError(
            "output.remove_prefix applies only to files with the trained tensors alone: set "
            "output.trainable_only or output.format diffsynth"
        )


def _check_best(config: TrainConfig) -> None:
    """Raise ValueError where checkpoints are to be compared by a loss that is not measured at each."""
    best, saved, measured = config.checkpoint.best, config.checkpoint.every, config.train.evaluate_every
    held_out = getattr(config.task, "held_out", 0.0)
    if best and not (saved and measured and held_out and saved % measured == 0):
        raise ValueError(
            "checkpoint.best compares held-out losses: hold examples out (task.held_out), and make "
            "checkpoint.every a multiple of train.evaluate_every"
        )


def _check_held_out(config: TrainConfig) -> None:
    """Raise ValueError for a held-out loss that is asked for where nothing is held out.

    A task of somebody else that has no such key may hold examples out by itself.
    """
    asked = {"train.evaluate_every": config.train.evaluate_every}
    asked["ema.evaluate"] = config.ema is not None and config.ema.evaluate
    if not getattr(config.task, "held_out", True):
        for key in (key for key, value in asked.items() if value):
            raise ValueError(
                f"{key} needs held-out examples, but there are none: set task.held_out, or leave it out"
            )
