"""YAML and JSON that people write by hand: what stands there twice is refused, for one of the two is lost."""

from __future__ import annotations

import json
from typing import Any

import yaml

from zerostart.errors import ConfigError

__all__ = ["parsed_json", "parsed_yaml"]


def parsed_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises ConfigError, which ``where`` begins, naming the line."""
    try:
        return yaml.load(text, _Unique)  # a safe one
    except _Twice as error:
        key, first, line = error.args
        raise ConfigError(
            f"{where}, line {line}: {key} is there twice, first in line {first}; leave one of them out"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2026-02-30 is taken for a date
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def parsed_json(text: str, where: str) -> Any:
    """The value of a JSON document. Raises ConfigError, which ``where`` begins.

    Half of a surrogate pair, which ``\\ud83d`` alone stands for, is no text that a tokenizer takes.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{where}: the name {key!r} is there twice; leave one of them out")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except ConfigError:
        raise
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: half of a surrogate pair, which is no character ({error})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a plain ValueError
        raise ConfigError(f"{where}: not valid JSON: {error}") from error


class _Unique(yaml.SafeLoader):
    """PyYAML's safe loader, without a second value for a key."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """As composed, before keys are merged into it, of which its own may replace some."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                before = first.setdefault((key.tag, key.value), key.start_mark)
                if before is not key.start_mark:
                    raise _Twice(key.value, before.line + 1, key.start_mark.line + 1)
        return node


class _Twice(Exception):
    """A key, and the lines in which it is."""
