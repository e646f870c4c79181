"""All errors of zerostart, in one tree.

Each class is also a subclass of the matching builtin. A message names the file, tensor or rank, and says what
to do. In a distributed load every rank raises the same type with the same text. The documentation has a
section for each class (``help_url``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

__all__ = [
    "BuildError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "ConversionError",
    "CoverageError",
    "DivergedError",
    "EngineError",
    "InsufficientMemoryError",
    "PeerError",
    "ReadError",
    "UnsupportedVersionError",
    "VerifyError",
    "WriteError",
    "ZerostartError",
]

#: Documentation page with a section for each class and each situation.
HELP = "docs/errors.md"
#: Situations with their own section, by class: each heading is a part of their messages. The first match
#: counts.
SITUATIONS: Mapping[str, tuple[str, ...]] = {
    "ConfigError": (
        "the ranks do not do the same",
        "make the Accelerator or TrainingArguments before the model",
        "in the middle of gradient accumulation",
        "belongs to another run",
        "did you mean",
        "does not divide",
        "is not available",
    ),
    "CheckpointError": (
        "none of its code was run",
        "are mixed",
        "it is not clear which one to load",
        "download it again",
    ),
    "CheckpointNotFoundError": ("no such model in the local hub cache",),
    "BuildError": ("the model's class is code that lies beside the checkpoint",),
    "EngineError": ("needs DeepSpeed, which cannot be imported", "is offloaded"),
    "ReadError": (
        "has another length on this machine",
        "was changed",
        "try again when the store answers",
    ),
    "WriteError": ("another process is saving to this directory",),
    "PeerError": ("the time-out of the process group",),
}

#: Characters that change a terminal or hide text: control characters, line separators, direction marks,
#: invisible characters and surrogates.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape control characters in ``text``, for one safe line in a terminal or log."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


#: Secrets in URLs, requests and responses: user and password, query, headers with credentials, signing
#: parameters outside a URL, tokens.
_SECRETS = (
    (r"://[^/\s]*@", "://"),
    (r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s?)'\"]+)\?[^\s'\"]*", r"\1"),
    (r"(?i)(authorization|x-amz-security-token|cookie)([\"']?\s*[:=]).*", r"\1\2 ***"),
    (
        r"(?i)([?&](x-amz-|x-goog-)?(sig(nature)?|credential|[a-z-]*token|[a-z]*keyid))=[^\s&\"'<>]+",
        r"\1=***",
    ),
    (r"\bBearer [\w.~+/=-]+|\bhf_[A-Za-z0-9]{20,}", "***"),
)


def without_secrets(text: str) -> str:
    """Remove passwords, tokens and signatures from ``text``."""
    for pattern, replacement in _SECRETS:
        text = re.sub(pattern, replacement, text)
    return text


def printable_record(record: logging.LogRecord) -> bool:
    """Remove secrets and control characters from a log record; a logging filter."""
    record.msg, record.args = printable(without_secrets(record.getMessage())), ()
    return True


class ZerostartError(Exception):
    """Base class of all errors of zerostart.

    ``str(error)`` is one line without secrets and control characters. A note below it in the traceback has
    ``help_url``.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(one) if isinstance(one, str) else one for one in args))
        self.add_note(f"See {self.help_url}")

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def help_url(self) -> str:
        """Documentation section on the situation of this error, otherwise on its class."""
        kind = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        text = " ".join(map(str, self.args))  # str(self) of a subclass may need attributes not set yet
        heading = next((words for words in SITUATIONS.get(kind, ()) if words in text), kind)
        # The anchor of the heading in Markdown.
        return f"{HELP}#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')}"


class ConfigError(ZerostartError, ValueError):
    """An argument or configuration value cannot be used."""


class CheckpointError(ZerostartError, ValueError):
    """A checkpoint file is malformed, out of range, or contradicts itself."""


class CheckpointNotFoundError(ZerostartError, FileNotFoundError):
    """There is no checkpoint, or a file that its index lists is missing."""


class ReadError(ZerostartError, OSError):
    """Reading a checkpoint failed, or a file ended early."""


class WriteError(ZerostartError, OSError):
    """Writing a checkpoint failed, for example without space or permission."""


class VerifyError(ZerostartError, ValueError):
    """A file or tensor of a saved checkpoint is missing or was changed."""


class ConversionError(ZerostartError, ValueError):
    """A weight conversion failed, or cannot be traced to an index map."""


class BuildError(ZerostartError, ValueError):
    """The model cannot be built without weights, or a tensor cannot get its value."""


class EngineError(ZerostartError, RuntimeError):
    """The engine is missing, misconfigured, or cannot train the model."""


class InsufficientMemoryError(EngineError, MemoryError):
    """The shards of a rank do not fit into the free memory."""


class UnsupportedVersionError(ZerostartError, ImportError):
    """An installed library has a version or code that zerostart does not support."""


class DivergedError(ZerostartError, FloatingPointError):
    """A loss, a gradient norm or the weights are no longer finite."""


class PeerError(ZerostartError, RuntimeError):
    """Another rank died or stopped answering in a collective step."""


class CoverageError(ZerostartError, ValueError):
    """The checkpoint does not cover the model exactly.

    ``missing`` and ``unexpected`` are names. ``mismatched`` maps a name to the shapes in the checkpoint and
    in the model. A list of strings makes a message of several lines.
    """

    def __init__(
        self,
        message: str | Sequence[str],
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__("\n".join(map(printable, [message] if isinstance(message, str) else message)))
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        lines = str(self).split("\n")
        return (type(self), (lines, self.missing, self.unexpected, self.mismatched))
