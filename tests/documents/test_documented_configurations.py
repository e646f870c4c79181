"""Every YAML block of README and docs is a configuration that is accepted, or a part of one."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from tests.documents.blocks import Block, blocks_of, pages
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.load import parse_config
from zerostart.training.config.sections import TaskConfig
from zerostart.training.loop.task import task_class

BLOCKS = [block for page in pages() for block in blocks_of(page) if block.language == "yaml"]
#: Keys of accelerate's own files.
LAUNCHERS = {"distributed_type"}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_keys_are_there(block: Block) -> None:
    values = yaml.safe_load(block.text)
    assert isinstance(values, dict)
    if LAUNCHERS & values.keys():
        from accelerate.commands.config.config_args import ClusterConfig

        assert set(values) - set(ClusterConfig.__dataclass_fields__) == set()
        return
    assert list(unknown(values, TrainConfig)) == []
    required = {name for name, found in TrainConfig.model_fields.items() if found.is_required()}
    if required <= values.keys():
        taken = task_class(values["task"]["name"]).sections & {"media"}
        needed = {name: {"source": "data"} for name in taken}
        parse_config({**needed, **values})


def unknown(values: dict[str, Any], section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Keys that the section does not have, and those of sections in it."""
    if section is TaskConfig and "name" in values:
        section = task_class(values["name"]).Settings
    for key, value in values.items():
        found = section.model_fields.get(key)
        if found is None:
            yield above + key
            continue
        inner = [k for k in (found.annotation, *get_args(found.annotation)) if is_section(k)]
        if inner and isinstance(value, dict):
            yield from unknown(value, inner[0], f"{above}{key}.")


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
