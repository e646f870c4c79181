"""Check every YAML block of README and docs against the configuration's keys."""

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
ACCELERATE_KEYS = {"distributed_type"}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_keys_exist(block: Block) -> None:
    values = yaml.safe_load(block.text)
    assert isinstance(values, dict)
    if ACCELERATE_KEYS & values.keys():
        from accelerate.commands.config.config_args import ClusterConfig

        assert set(values) - set(ClusterConfig.__dataclass_fields__) == set()
        return
    assert list(unknown_keys(values, TrainConfig)) == []
    required = {name for name, field in TrainConfig.model_fields.items() if field.is_required()}
    if required <= values.keys():
        sections = task_class(values["task"]["name"]).sections & {"media"}
        defaults = {name: {"source": "data"} for name in sections}
        parse_config({**defaults, **values})


def unknown_keys(values: dict[str, Any], section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys that the section and its subsections do not have."""
    if section is TaskConfig and "name" in values:
        section = task_class(values["name"]).Settings
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None:
            yield prefix + key
            continue
        inner = [k for k in (field.annotation, *get_args(field.annotation)) if is_section(k)]
        if inner and isinstance(value, dict):
            yield from unknown_keys(value, inner[0], f"{prefix}{key}.")


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
