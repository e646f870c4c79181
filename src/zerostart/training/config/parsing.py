"""YAML and JSON that people write by hand: what stands there twice is refused, for one of the two is lost."""

from __future__ import annotations

import json
from typing import Any

import yaml

from zerostart.errors import ConfigError

#: Characters of a document that are read at most: some seconds of PyYAML's time.
MAX_CHARACTERS = 1 << 18


def parsed_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises ConfigError, which ``where`` begins, naming the line."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where} has {len(text)} characters, but at most {MAX_CHARACTERS} are read")
    try:
        return yaml.load(text, _Unique)  # a safe one
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
    """PyYAML's safe loader, without a second value for a key, and without aliases.

    A few aliases of aliases in a row stand for more values than there is memory for.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.get_event()  # type: ignore[no-untyped-call]
            told = "aliases are not read: write the value out"
            raise yaml.MarkedYAMLError(problem=told, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # By tag and text: ``1`` and ``"1"`` are two keys.
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if before := first.get((key.tag, key.value)):
                    told = f"{key.value} is given twice, first in line {before}; leave one of them out"
                    raise yaml.MarkedYAMLError(problem=told, problem_mark=key.start_mark)
                first[key.tag, key.value] = key.start_mark.line + 1
        return node
