"""YAML and JSON that people write by hand: what stands there twice is refused, for one of the two is lost."""

from __future__ import annotations

import json
from typing import Any

import yaml

from zerostart.errors import ConfigError

#: Characters of a document, some seconds of PyYAML's time; and values of it, each as often as it is referred
#: to: a few aliases of aliases in a row are more than there is memory for.
MOST_TEXT, MOST_VALUES = 1 << 18, 100_000
#: Digits of a number.
_LONGEST = 100


def parsed_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises ConfigError, which ``where`` begins, naming the line."""
    if len(text) > MOST_TEXT:
        raise ConfigError(f"{where} has {len(text)} characters, but at most {MOST_TEXT} are read")
    try:
        return yaml.load(text, _Unique)  # a safe one
    except _Twice as error:
        key, first, line = error.args
        raise ConfigError(
            f"{where}, line {line}: {key} is given twice, first in line {first}; leave one of them out"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "; are this line and those before it indented alike?" if "block" in str(error) else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem or error}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2026-02-30 is taken for a date
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def parsed_json(text: str, where: str) -> Any:
    """The value of a JSON document. Raises ConfigError, which ``where`` begins.

    Half of a surrogate pair, which ``\\ud83d`` alone stands for, is no text that a tokenizer takes.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{where}: the name {key!r} is given twice; leave one of them out")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
        # Only an escape can bring one in: the text itself was decoded as UTF-8.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except ConfigError:
        raise
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: half of a surrogate pair, which is not a character ({error})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a plain ValueError
        raise ConfigError(f"{where}: not valid JSON: {error}") from error


class _Unique(yaml.SafeLoader):
    """PyYAML's safe loader, without a second value for a key, and of values that anybody can go through."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _weigh(node, {})
        return node

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # By tag and text: ``1`` and ``"1"`` are two keys.
        first: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                before = first.setdefault((key.tag, key.value), key.start_mark)
                if before is not key.start_mark:
                    raise _Twice(key.value, before.line + 1, key.start_mark.line + 1)
        return node


def _weigh(node: Any, weights: dict[int, int]) -> int:
    """How many values a node stands for, with those that it refers to. Raises YAMLError for too many."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST:
            raise yaml.YAMLError(f"a number of {len(node.value)} digits in line {node.start_mark.line + 1}")
        return 1
    # By identity: an alias is the very node that it refers to. What was weighed counts again, each time.
    if (known := weights.get(id(node))) is not None:
        # Met again before its own weight was known.
        if not known:
            raise yaml.YAMLError(f"the value that begins in line {node.start_mark.line + 1} contains itself")
        return known
    weights[id(node)] = 0  # begun
    inner = (
        [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    )
    total = 1 + sum(_weigh(part, weights) for part in inner)
    if total > MOST_VALUES:
        line = node.start_mark.line + 1
        raise yaml.YAMLError(
            f"the value that begins in line {line} expands to more than {MOST_VALUES} values"
        )
    weights[id(node)] = total
    return total


class _Twice(Exception):
    """A key, and the lines in which it is."""
