"""Parse YAML and JSON that users write by hand."""

from __future__ import annotations

import json
from typing import Any

import yaml

from zerostart.errors import ConfigError

#: Maximum size of a YAML document, in characters: PyYAML reads it in some seconds.
MAX_CHARACTERS = 1 << 18


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML document.

    Raises ConfigError, which ``where`` begins, naming the line.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where} has {len(text)} characters, but at most {MAX_CHARACTERS} are read")
    try:
        return yaml.load(text, _UniqueKeys)  # a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "; are this line and those before it indented alike?" if "block" in str(error) else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem or error}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2026-02-30 is taken for a date
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON document. Raises ConfigError, which ``where`` begins."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, but it refuses a second value for a key."""

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # ``1`` and ``"1"`` differ by their tags.
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if before := first.get((key.tag, key.value)):
                    problem = f"{key.value} is given twice, first in line {before}; leave one of them out"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                first[key.tag, key.value] = key.start_mark.line + 1
        return node
