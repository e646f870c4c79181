"""Parts of pages that are made while the site is built, and links that lead out of this folder."""

from __future__ import annotations

import inspect
import re
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.main
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.core import TyperArgument, TyperCommand, TyperGroup

from zerostart.cli import application
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.sections import TaskConfig
from zerostart.training.loop.task import known_tasks, task_class

DOCS = Path(__file__).parents[1]
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY: str = PROJECT["urls"]["Repository"]

_HEADS = ("key", "values", "default", "meaning")
_GENERATED = re.compile(r"^<!-- generated: (commands|configuration) -->$", re.MULTILINE)
_LINK = re.compile(r"\]\((\.\./[\w./-]+)((?:#[\w-]+)?\))")


def prepare(_app: object, page: str, source: list[str]) -> None:
    """Change the text of ``page`` in place, as Sphinx's event ``source-read`` has it."""
    makers = {"commands": _commands, "configuration": _configuration}
    text = _GENERATED.sub(lambda found: "\n".join(makers[found[1]]()), source[0])
    source[0] = _LINK.sub(lambda found: _link(found, page), text)


def _link(found: re.Match[str], page: str) -> str:
    """Lead a link to a file outside of this folder into the repository."""
    target = ((DOCS / page).parent / found[1]).resolve()
    if target.is_relative_to(DOCS) or not target.exists():
        return found[0]
    kind = "tree" if target.is_dir() else "blob"
    return f"]({REPOSITORY}/{kind}/main/{target.relative_to(DOCS.parent)}{found[2]}"


def _commands() -> Iterator[str]:
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=f"zerostart {name}")
        yield from (f"## {name}", "", "```text", command.get_usage(context), "```", "")
        yield from (_prose(command.help or ""), "")
        yield from _table(("option", "meaning", "default"), _options(command))
        examples = (command.epilog or "").splitlines()[2:]  # after the mark that keeps lines, and a title
        yield from ("", "```bash", *(line.strip() for line in examples), "```", "")


def _options(command: TyperCommand) -> Iterator[tuple[str, str, str]]:
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            word = f"`{parameter.metavar or str(parameter.name).upper()}`"
        else:
            names = [*parameter.opts, *parameter.secondary_opts]
            word = ", ".join(f"`{option}`" for option in names)
        shown = not callable(parameter.default) and parameter.default not in (None, False)
        default = f"`{parameter.default}`" if shown else ""
        yield word, _prose(getattr(parameter, "help", None) or ""), default


def _configuration() -> Iterator[str]:
    plain = []
    for name, field in TrainConfig.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            plain.append((name, field))
            continue
        yield from (f"## {name}", "", _docstring(section), "")
        yield from _table(_HEADS, (_key(f"{name}.{k}", f) for k, f in _fields(section)))
        if section is TaskConfig:
            yield from _tasks()
    yield from ("## Keys without a section", "", _docstring(TrainConfig), "")
    yield from _table(_HEADS, (_key(name, field) for name, field in plain))


def _tasks() -> Iterator[str]:
    """The further keys of each task."""
    for name in known_tasks():
        settings = task_class(name).Settings
        own = [(key, field) for key, field in settings.model_fields.items() if key != "name"]
        if own:
            yield from (f"### task.name: {name}", "", _docstring(settings), "")
            yield from _table(_HEADS, (_key(f"task.{k}", f) for k, f in own))


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, which may also be left out (``MediaConfig | None``)."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from _fields(inner, f"{prefix}{name}.")


def _key(name: str, field: Any) -> tuple[str, str, str, str]:
    values, meaning = _spoken(field.annotation), _prose(field.description or "")
    if field.is_required():
        return f"`{name}`", values, "must be given", meaning
    # A factory that is a class makes an empty section or list; a function looks at the machine, which a page
    # cannot: its key says what null stands for.
    default = field.get_default(call_default_factory=isinstance(field.default_factory, type))
    return f"`{name}`", values, "" if default is PydanticUndefined else f"`{_yaml(default)}`", meaning


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _spoken(kind: Any) -> str:
    """A type in words of YAML."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _spoken(inside[0])
    if origin is Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_spoken(one) for one in inside if one is not type(None)))
    if origin in (list, tuple, set, frozenset):
        return "a list" + (f" of {_spoken(inside[0])}" if inside else "")
    if origin is dict or kind is dict:
        return "a mapping"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    return names.get(kind, "any value" if kind is Any else getattr(kind, "__name__", str(kind)))


def _docstring(owner: type) -> str:
    return _prose(inspect.getdoc(owner) or "")


def _prose(text: str) -> str:
    """Text of a docstring as Markdown: roles become code, and angle brackets are no tags."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _table(heads: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |"
    yield ""
