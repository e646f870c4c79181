"""Every error that zerostart raises on purpose, in one tree.

Each leaf is also the builtin that fits, so that a caller can catch either. A message names what is
concerned (file, tensor, rank) and the way out. In a distributed load every rank raises the same type
with the same text. The documentation has a section for each class (``help_url``).
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

#: Page of the repository with a section for each class and each of these situations.
HELP = "docs/errors.md"
#: By class the situations with a section of their own there: the heading is what their messages have in
#: common. The first that is found in a message counts.
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

#: What moves a cursor, colours, ends a line or turns the direction of writing: control characters of both
#: sets, separators of lines, marks and overrides of direction, what is invisible, and halves of pairs.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape control characters in ``text``, so that it is one harmless line of a terminal or a log.

    Each character that would be carried out and not shown is its escape; all others, of any script, stay.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


#: What may be secret in URLs, requests and responses: a user and password; a query; a header with
#: credentials; a parameter that signs a request without a URL; a token.
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
    """Remove from ``text`` what may be secret: passwords, and what signs or authorises a request."""
    for pattern, instead in _SECRETS:
        text = re.sub(pattern, instead, text)
    return text


def printable_record(record: logging.LogRecord) -> bool:
    """Make the text of a log record one harmless line without secrets, and let it pass."""
    record.msg, record.args = printable(without_secrets(record.getMessage())), ()
    return True


class ZerostartError(Exception):
    """Root of all errors that zerostart raises; as a text it is one line that is fit for a terminal.

    ``str(error)`` is the message alone, without secrets (``without_secrets``) and control characters
    (``printable``). A note (``__notes__``) below it in a traceback has ``help_url``.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(one) if isinstance(one, str) else one for one in args))
        self.add_note(f"See {self.help_url}")

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def help_url(self) -> str:
        """Where the documentation has a section on this error: on its situation, else on its class."""
        kind = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        text = " ".join(map(str, self.args))  # of a class of others str() may need what it is still to get
        heading = next((words for words in SITUATIONS.get(kind, ()) if words in text), kind)
        # As Markdown makes the anchor of a heading.
        return f"{HELP}#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')}"


class ConfigError(ZerostartError, ValueError):
    """An argument or a configuration value that cannot be used."""


class CheckpointError(ZerostartError, ValueError):
    """A checkpoint file that is not what it says: malformed, out of range, or contradicting itself."""


class CheckpointNotFoundError(ZerostartError, FileNotFoundError):
    """No checkpoint at the place named, or a file that its index lists is absent."""


class ReadError(ZerostartError, OSError):
    """Reading a checkpoint's bytes failed, or the file ended early."""


class WriteError(ZerostartError, OSError):
    """Writing a checkpoint failed: no space, no permission, or the place is not a directory."""


class VerifyError(ZerostartError, ValueError):
    """A saved checkpoint that is not what was saved: a file or a tensor is missing, or has other contents."""


class ConversionError(ZerostartError, ValueError):
    """A weight conversion that failed, or that cannot be traced to an index map."""


class BuildError(ZerostartError, ValueError):
    """The model cannot be built without its weights, or one of its tensors cannot be given its value."""


class EngineError(ZerostartError, RuntimeError):
    """The engine is absent, misconfigured, or cannot train what is asked for."""


class InsufficientMemoryError(EngineError, MemoryError):
    """What every rank is to hold does not fit in the memory that is free."""


class UnsupportedVersionError(ZerostartError, ImportError):
    """An installed library has a version, or a shape, that zerostart does not know."""


class DivergedError(ZerostartError, FloatingPointError):
    """What is trained is no longer finite: a loss, a gradient norm, or the weights."""


class PeerError(ZerostartError, RuntimeError):
    """Another rank died, or stopped answering, during a collective step."""


class CoverageError(ZerostartError, ValueError):
    """The checkpoint does not cover the model exactly.

    ``missing`` and ``unexpected`` are names; ``mismatched`` maps a name to the shape that the
    checkpoint gives and the shape that the model has. A message of several lines is a list of them.
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
