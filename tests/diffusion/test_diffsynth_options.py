"""Documentation of DiffSynth-Studio's options names existing keys."""

import re
from pathlib import Path
from typing import Any

from zerostart.training.config.configuration import TrainConfig
from zerostart.training.loop.task import task_class

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "diffsynth-options.md"
#: Keys by the flag without its dashes.
ROWS = {
    flag: re.findall(r"`([\w.]+)`", keys)
    for flag, keys in re.findall(r"^\| `--(\w+)` \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_each_documented_key_exists() -> None:
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
