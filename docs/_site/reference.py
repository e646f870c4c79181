"""Write the generated parts of the documentation (``make reference``).

Whole pages go to ``docs/generated``. A region of another page stands between ``<!-- generated: NAME -->`` and
``<!-- end -->``. ``--check`` writes nothing and fails if a file is stale.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.main
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.core import TyperArgument, TyperCommand, TyperGroup

from zerostart import errors
from zerostart.cli import application
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.sections import TaskConfig
from zerostart.training.loop.task import known_tasks, task_class

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))
import chart  # noqa: E402

_KEY_TABLE = ("key", "values", "default", "meaning")
_REGION = re.compile(r"(?<=^<!-- generated: )(?P<name>[\w-]+)( -->\n).*?(?=^<!-- end -->$)", re.M | re.S)

#: Public objects by the headings of the Python reference; errors follow.
PYTHON = {
    "Loading": (
        "load",
        "plan",
        "loading.forecast.result:WorldPlan",
        "load_pipeline",
        "Placement",
        "drop_components",
    ),
    "A sharded model": ("report", "live.report:Report", "full_tensors", "gathered"),
    "Saving, resuming, comparing, converting": (
        *(
            "save",
            "state.saving.save:SaveReport",
            "save_state",
            "state.resuming.background:Saving",
            "load_state",
        ),
        *("verify", "checkpoint.verifying:Verified", "diff", "state.comparing.diff:Difference"),
        *("state.comparing.diff:TensorDifference", "digest", "convert", "state.converting.convert:Converted"),
    ),
    "Inference engines": (
        *("refit", "refit.refitter:Refitter", "refit.pushes:PushReport"),
        *("weight_source", "refit.within:WeightSource"),
    ),
    "Existing scripts": ("enable", "enabled", "disable"),
    "Training": ("gradient_checkpoint", "checkpoint_blocks"),
    "Tasks of your own": ("training:register_task", "training:Task", "training:TaskConfig"),
}


# --- the command line


def commands() -> Iterator[tuple[str, TyperCommand]]:
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    yield from group.commands.items()  # type: ignore[misc]


def command_page() -> Iterator[str]:
    yield from ("# All commands and options", "", "`zerostart COMMAND --help` prints the same.", "")
    for name, command in commands():
        context = typer.Context(command, info_name=f"zerostart {name}")
        yield from (f"## {name}", "", "```text", command.get_usage(context), "```", "")
        yield from (to_markdown(command.help or ""), "")
        yield from table(("option", "meaning", "default"), options_of(command))
        examples = (command.epilog or "").splitlines()[2:]  # after the mark that keeps lines, and a title
        yield from ("```bash", *(line.strip() for line in examples if line.strip()), "```", "")


def command_summaries() -> Iterator[str]:
    rows = ((link(name, "commands", name), summary_of(command.help)) for name, command in commands())
    yield from table(("command", ""), rows)


def options_of(command: TyperCommand) -> Iterator[tuple[str, str, str]]:
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            names = [parameter.metavar or str(parameter.name).upper()]
        else:
            names = [*parameter.opts, *parameter.secondary_opts]
        has_default = not callable(parameter.default) and parameter.default not in (None, False)
        default = f"`{parameter.default}`" if has_default else ""
        meaning = to_markdown(getattr(parameter, "help", None) or "")
        yield ", ".join(f"`{name}`" for name in names), meaning, default


# --- configuration keys of `zerostart train`


def configuration_page() -> Iterator[str]:
    yield from ("# All keys of `zerostart train`", "")
    for name, section in sections():
        yield from (f"## {name}", "", to_markdown(inspect.getdoc(section) or ""), "")
        yield from table(_KEY_TABLE, (key_row(f"{name}.{key}", field) for key, field in fields_of(section)))
        if section is TaskConfig:
            yield from task_tables()
    yield from ("## Keys without a section", "")
    fields = TrainConfig.model_fields.items()
    yield from table(
        _KEY_TABLE, (key_row(k, field) for k, field in fields if not section_in(field.annotation))
    )


def configuration_summaries() -> Iterator[str]:
    rows = (
        (link(name, "configuration", name), summary_of(inspect.getdoc(each))) for name, each in sections()
    )
    yield from table(("section", ""), rows)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in TrainConfig.model_fields.items():
        section = section_in(field.annotation)
        if section is not None:
            yield name, section


def task_tables() -> Iterator[str]:
    for name in known_tasks():
        settings = task_class(name).Settings
        own = [(key, field) for key, field in settings.model_fields.items() if key != "name"]
        if own:
            yield from (f"### task.name: {name}", "", to_markdown(inspect.getdoc(settings) or ""), "")
            yield from table(_KEY_TABLE, (key_row(f"task.{key}", field) for key, field in own))


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's type, such as ``MediaConfig | None``."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from fields_of(inner, f"{prefix}{name}.")


def key_row(name: str, field: Any) -> tuple[str, str, str, str]:
    values, meaning = describe_type(field.annotation), to_markdown(field.description or "")
    if field.is_required():
        return f"`{name}`", values, "must be given", meaning
    # A class as factory makes an empty section or list. A function asks the machine, which a page cannot.
    default = field.get_default(call_default_factory=isinstance(field.default_factory, type))
    return f"`{name}`", values, "" if default is PydanticUndefined else f"`{to_yaml(default)}`", meaning


def to_yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def describe_type(kind: Any) -> str:
    """Describe a type in words of YAML."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return describe_type(inner[0])
    if origin is Literal:
        return ", ".join(f"`{to_yaml(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(each) for each in inner if each is not type(None)))
    if origin in (list, tuple, set, frozenset):
        return "a list" + (f" of {describe_type(inner[0])}" if inner else "")
    if origin is dict or kind is dict:
        return "a mapping"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    return names.get(kind, "any value" if kind is Any else getattr(kind, "__name__", str(kind)))


# --- Python


def python_page() -> Iterator[str]:
    yield from ("# All public functions and classes", "")
    for heading, names in PYTHON.items():
        yield from (f"## {heading}", "")
        for name in names:
            yield from describe(*find_object(name))
    yield from ("## Errors", "", "All are in `zerostart.errors`.", "")
    kinds = [getattr(errors, name) for name in errors.__all__]
    rows = [
        (
            f"`{kind.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
            summary_of(kind.__doc__),
        )
        for kind in kinds
    ]
    yield from table(("class", "bases", ""), rows)


def python_summaries() -> Iterator[str]:
    objects = (find_object(name) for names in PYTHON.values() for name in names if ":" not in name)
    rows = ((link(name, "python", name), summary_of(inspect.getdoc(value))) for name, value in objects)
    yield from table(("name", ""), rows)


def find_object(name: str) -> tuple[str, Any]:
    """Return the full name and the value of an entry of ``PYTHON``."""
    module, _, attribute = name.rpartition(":")
    owner = importlib.import_module(f"zerostart.{module}" if module else "zerostart")
    return f"{owner.__name__}.{attribute}", getattr(owner, attribute)


def describe(name: str, value: Any, level: int = 3) -> Iterator[str]:
    yield from (f"{'#' * level} {name}", "")
    is_record = inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))
    if not is_record and not isinstance(value, property):
        yield from ("```py", signature_of(name.rpartition(".")[2] if level > 3 else name, value), "```", "")
    yield from docstring_lines(inspect.getdoc(value) or "")
    if is_record:
        yield from table(("field", "", ""), attribute_rows(value))
    if inspect.isclass(value) and not issubclass(value, BaseModel):
        for each, member in vars(value).items():
            is_method = inspect.isfunction(member) or isinstance(member, classmethod | property)
            if is_method and not each.startswith("_") and inspect.getdoc(member):
                yield from describe(f"{name}.{each}", getattr(value, each), level + 1)


def signature_of(name: str, value: Any) -> str:
    """Render a call with defaults and types, on one line if it is short."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return name
    words, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        words.append(
            str(parameter).replace("'", "") if isinstance(parameter.default, type(None)) else str(parameter)
        )
    words = [re.sub(r": '([^']*)'", r": \1", word) for word in words]
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty or inspect.isclass(value) else f" -> {returns}"
    line = f"{name}({', '.join(words)}){arrow}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(words) + f",\n){arrow}"


def attribute_rows(record: type) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of a record with types and comments (``#:``)."""
    comments: list[str] = []
    for line in inspect.getsource(record).splitlines():
        if match := re.match(r" {4}#: ?(.*)", line):
            comments.append(match[1])
        elif match := re.match(r" {4}([a-z]\w*): ([^=]+?)(?: = .*)?$", line):
            yield f"`{match[1]}`", f"`{match[2]}`", to_markdown(" ".join(comments))
            comments = []


def docstring_lines(text: str) -> Iterator[str]:
    """Turn a docstring with sections (``Args:``, ``Raises:``, ``Example:``) into Markdown."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Example):\n", text, flags=re.M)
    yield from (to_markdown(parts[0]).strip(), "")
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = inspect.cleandoc("\n" + body).splitlines()
        if title == "Example":
            yield from ("```pycon", *lines, "```", "")
        elif title in ("Returns", "Yields"):
            yield from (f"{title}: {to_markdown(' '.join(line.strip() for line in lines))}", "")
        else:
            yield from ({"Args": "Arguments"}.get(title, title) + ":", "")
            yield from (to_markdown(re.sub(r"^([\w*]+(?:, [\w*]+)*):", r"- ``\1``:", line)) for line in lines)
            yield ""


# --- figures


def load_table() -> Iterator[str]:
    yield from figure_table(
        "load.json",
        ("route", "seconds (range)", "memory above the shard"),
        {
            "ceiling": "reading the bytes, nothing else",
            "zerostart-deepspeed": "zerostart, DeepSpeed ZeRO-3",
            "stock-deepspeed": "transformers and DeepSpeed ZeRO-3",
            "zerostart-fsdp2": "zerostart, FSDP2",
            "native-fsdp2": "transformers' own FSDP2 loading",
        },
    )


def cold_table() -> Iterator[str]:
    yield from figure_table(
        "load_cold_peers.json",
        ("route", "seconds (range)", "memory above the shard"),
        {
            "zerostart-deepspeed": "zerostart, DeepSpeed ZeRO-3",
            "stock-deepspeed": "transformers and DeepSpeed ZeRO-3",
            "zerostart-fsdp2": "zerostart, FSDP2",
            "native-fsdp2": "transformers' own FSDP2 loading",
        },
    )


def figure_table(file: str, heads: tuple[str, ...], arms: dict[str, str]) -> Iterator[str]:
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = []
    for arm, title in arms.items():
        row = result["summary"][arm]
        low, high = row["seconds_range"]
        rows.append(
            (
                title,
                f"{row['seconds']:.1f} ({low:.1f} to {high:.1f})",
                f"{row['over_shard'] / 2**20:,.0f} MiB",
            )
        )
    yield from table(heads, rows)
    machine = result["machine"]
    libraries = ", ".join(
        f"{name} {machine['packages'][name]}" for name in ("torch", "transformers", "deepspeed")
    )
    facts = f"{result['date']}: medians of {result['repeats']}, {machine['cores']} CPU cores, {libraries}"
    yield f"<sub>{facts}</sub>"
    yield ""


# --- Markdown


def to_markdown(text: str) -> str:
    """Turn double backticks and roles into code, and escape angle brackets."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def summary_of(text: str | None) -> str:
    """Return the first sentence of a docstring or help text."""
    first = " ".join((text or "").strip().partition("\n\n")[0].split())
    return to_markdown(re.split(r"(?<=[.!?]) ", first, maxsplit=1)[0])


def link(title: str, page: str, heading: str) -> str:
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[`{title}`](../generated/{page}.md#{anchor})"


def table(heads: Sequence[str], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |"
    yield ""


# --- files

Lines = Callable[[], Iterator[str]]
#: Generated pages by name.
PAGES: dict[str, Lines] = {
    "commands": command_page,
    "configuration": configuration_page,
    "python": python_page,
}
#: Generated regions by page.
REGIONS: dict[str, dict[str, Lines]] = {
    "docs/reference/command-line.md": {"commands": command_summaries},
    "docs/reference/configuration.md": {"configuration": configuration_summaries},
    "docs/reference/python.md": {"python": python_summaries},
    "docs/figures.md": {"load": load_table, "load-cold": cold_table},
}


def generate() -> Iterator[tuple[Path, str]]:
    """Yield each file with its generated text."""
    note = "Generated by `make reference`; do not edit."
    for name, lines in PAGES.items():
        title, *rest = lines()
        text = "\n".join(["---", "orphan: true", "---", "", title, "", note, *rest])
        yield DOCS / "generated" / f"{name}.md", re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    for name, regions in REGIONS.items():
        path = ROOT / name

        def fill(match: re.Match[str], regions: dict[str, Lines] = regions) -> str:
            return "\n".join([f"{match['name']} -->", *regions[match["name"]]()])

        yield path, _REGION.sub(fill, path.read_text(encoding="utf-8"))
    yield chart.CHART, chart.drawing()


def stale_files() -> list[tuple[Path, str]]:
    """List the files that differ from their generated text."""
    return [(path, text) for path, text in generate() if not path.exists() or path.read_text("utf-8") != text]


def main() -> None:
    stale = stale_files()
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(
                "stale, run `make reference`: " + ", ".join(str(path.relative_to(ROOT)) for path, _ in stale)
            )
        return
    for path, text in stale:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
