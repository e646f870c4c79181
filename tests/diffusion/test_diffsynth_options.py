"""The page of DiffSynth-Studio's options has every flag of its parsers and scripts, and keys that exist."""

import argparse
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.diffusion.oracle import BESIDE
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.loop.task import task_class

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "diffsynth-options.md"
#: Keys by the flag without its dashes.
ROWS = {
    flag: re.findall(r"`([\w.]+)`", keys)
    for flag, keys in re.findall(r"^\| `--(\w+)` \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
}
#: A checkout of DiffSynth-Studio, whose scripts are not in its package.
CHECKOUT = os.environ.get("ZEROSTART_DIFFSYNTH")
PARSERS = Path(CHECKOUT or BESIDE) / "diffsynth" / "diffusion" / "parsers.py"


def test_each_key_is_one_of_a_configuration() -> None:
    fields: dict[str, Any] = {}
    for section, described in TrainConfig.model_fields.items():
        kinds = (described.annotation, *getattr(described.annotation, "__args__", ()))
        fields[section] = next(
            (set(kind.model_fields) for kind in kinds if hasattr(kind, "model_fields")), set()
        )
    fields["task"] = set(task_class("flow-matching").Settings.model_fields)
    keys = {key.partition(".")[::2] for keys in ROWS.values() for key in keys}
    assert len(keys) > 20
    assert [key for key in keys if key[0] not in fields or (key[1] and key[1] not in fields[key[0]])] == []


@pytest.mark.skipif(not PARSERS.is_file(), reason="DiffSynth-Studio is not here: make build/diffsynth")
def test_each_flag_of_its_parsers_has_a_row() -> None:
    found = set()
    for name, add in runpy.run_path(str(PARSERS)).items():
        if name.startswith("add_") and callable(add):
            parser = argparse.ArgumentParser(add_help=False)
            add(parser)
            found |= {action.dest for action in parser._actions}
    assert found - ROWS.keys() == set()
    assert len(found) > 30


@pytest.mark.skipif(not CHECKOUT, reason="no checkout of DiffSynth-Studio: set ZEROSTART_DIFFSYNTH")
@pytest.mark.parametrize("family", ["wanvideo", "qwen_image", "flux", "flux2", "z_image"])
def test_each_flag_of_its_scripts_has_a_row(family: str) -> None:
    script = Path(str(CHECKOUT)) / "examples" / family / "model_training" / "train.py"
    flags = set(re.findall(r'add_argument\("--(\w+)"', script.read_text()))
    assert flags
    assert flags - ROWS.keys() == set()
