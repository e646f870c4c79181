"""What is known of rows of media from an earlier start, so that their files need not be opened again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

#: Digests, of 16 bytes, of a row's names, of these with lengths and times of its files, and of its contents.
Described: TypeAlias = tuple[bytes, bytes, bytes]
_SIZE = 16


@dataclass(frozen=True)
class KnownRows:
    """The digests of contents by the two others."""

    by_name: Mapping[bytes, bytes] = field(default_factory=dict)
    by_state: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Described], before: KnownRows) -> KnownRows:
        """What is known ``before``, and of ``rows``; of those with the same names the last one counts."""
        by_name, by_state = dict(before.by_name), dict(before.by_state)
        for name, state, contents in rows:
            by_name[name] = contents
            by_state[state] = contents
        return cls(by_name, by_state)

    def packed(self) -> bytes:
        """As bytes."""
        parts = (b"".join(key + value for key, value in one.items()) for one in (self.by_name, self.by_state))
        names, states = parts
        return len(names).to_bytes(8, "little") + names + states

    @classmethod
    def unpacked(cls, data: bytes) -> KnownRows:
        """From ``packed``; nothing of what is damaged."""
        end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < 8 or end > len(data) or (end - 8) % (2 * _SIZE) or (len(data) - end) % (2 * _SIZE):
            return cls()
        return cls(_pairs(data[8:end]), _pairs(data[end:]))


def _pairs(data: bytes) -> dict[bytes, bytes]:
    starts = range(0, len(data), 2 * _SIZE)
    return {data[at : at + _SIZE]: data[at + _SIZE : at + 2 * _SIZE] for at in starts}
