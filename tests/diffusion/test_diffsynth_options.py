"""The page of DiffSynth-Studio's options: every flag of its parsers, and keys that a configuration has."""

import argparse
import ast
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.diffusion import diffsynth_options
from tests.diffusion.diffsynth_options import PATH, ROWS, text
from tests.diffusion.oracle import BESIDE
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.loop.task import task_class

#: A checkout of DiffSynth-Studio, whose scripts are not in its package.
CHECKOUT = os.environ.get("ZEROSTART_DIFFSYNTH")


def test_the_page_is_as_the_table() -> None:
    assert PATH.read_text(encoding="utf-8") == text()
    assert len({row.flag for row in ROWS}) == len(ROWS)
    assert [row.flag for row in ROWS if not row.keys and not row.note] == []


def test_each_key_is_one_of_a_configuration() -> None:
    fields: dict[str, Any] = {}
    for section, described in TrainConfig.model_fields.items():
        kinds = (described.annotation, *getattr(described.annotation, "__args__", ()))
        fields[section] = next(
            (set(kind.model_fields) for kind in kinds if hasattr(kind, "model_fields")), set()
        )
    fields["task"] = set(task_class("flow-matching").Settings.model_fields)
    keys = {key for row in ROWS for key in row.keys}
    assert [key for key in keys if key.partition(".")[0] not in fields] == []
    assert [key for key in keys if "." in key and key.split(".")[1] not in fields[key.split(".")[0]]] == []


def parsers() -> list[Path]:
    root = Path(CHECKOUT) if CHECKOUT else BESIDE
    return [root / "diffsynth" / "diffusion" / "parsers.py"]


@pytest.mark.skipif(not parsers()[0].is_file(), reason="DiffSynth-Studio is not here: make build/diffsynth")
def test_each_flag_of_its_parsers_has_a_row() -> None:
    made = runpy.run_path(str(parsers()[0]))
    found = set()
    for name, add in made.items():
        if name.startswith("add_") and callable(add):
            parser = argparse.ArgumentParser(add_help=False)
            add(parser)
            found |= {action.dest for action in parser._actions}
    assert found - {row.flag for row in ROWS} == set()
    assert len(found) > 30


@pytest.mark.skipif(not CHECKOUT, reason="no checkout of DiffSynth-Studio: set ZEROSTART_DIFFSYNTH")
@pytest.mark.parametrize("family", ["wanvideo", "qwen_image", "flux", "flux2", "z_image"])
def test_each_flag_of_its_scripts_has_a_row(family: str) -> None:
    script = Path(str(CHECKOUT)) / "examples" / family / "model_training" / "train.py"
    lines = [line for line in script.read_text().splitlines() if "add_argument(" in line]
    flags = {line.split('"--')[1].split('"')[0] for line in lines}
    assert flags
    assert flags - {row.flag for row in ROWS} == set()


def named_in(place: str) -> str:
    """The text of a test, and of what of its own file is named in it, as far as that goes."""
    file, _, function = place.partition("::")
    [path] = (PATH.parents[1] / "tests").rglob(file)
    source = path.read_text(encoding="utf-8")
    lines, parts = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            parts[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts[ast.unparse(target)] = ast.get_source_segment(source, node) or ""
    seen, text = {function}, parts[function]
    while more := [name for name in parts.keys() - seen if re.search(rf"\b{name}\b", text)]:
        seen.update(more)
        text += "".join(parts[name] for name in more)
    return text


def test_each_key_is_in_the_test_that_is_named() -> None:
    """Each key is in exactly one, which is there; where no key is, the page says why."""
    keys = {key for row in ROWS for key in row.keys}
    tested = diffsynth_options.TESTED
    assert tested.keys() == keys
    words = {key: key.rpartition(".")[2] for key in tested}
    assert [k for k, place in tested.items() if not re.search(rf"\b{words[k]}\b", named_in(place))] == []
