"""Text to token sequences: documents from files or the standard library, tokenised, packed and split.

Every rank prepares the same sequences by itself, which `inputs` makes sure of, and keeps them as one flat
tensor of 4 bytes a token.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import DataConfig
from zerostart.training.config.parsing import parsed_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The value of ``data.source`` that stands for the docstrings of the standard library.
STDLIB_DOCSTRINGS = "stdlib-docstrings"

_TEXT_SUFFIXES = (".txt", ".md", ".rst")
_BATCH = 256  # documents a tokenizer call: enough for its threads, little in memory
_SHORTEST_DOCSTRING = 80  # characters; shorter ones are mostly "See the base class."
# Installed packages are no part of the library, and tests hardly carry docstrings.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo"}


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Token sequences; item ``i`` is ``{"input_ids": int64 [length], "special_tokens_mask": same}``.

    ``tokens`` is all of them in a row (int32, with each token's sign bit free: a special token is stored
    as ``-1 - id``), ``ends`` where each one ends.
    """

    def __init__(self, tokens: torch.Tensor, ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.ends = list(ends)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def longest(self) -> int:
        """Tokens of the longest one."""
        return max(end - start for start, end in zip((0, *self.ends), self.ends, strict=False))

    def digest(self) -> str:
        """A digest of all tokens and of where sequences end: equal for equal data, wherever they are from."""
        state = hashlib.blake2b(self.tokens.contiguous().numpy().data)
        state.update(torch.tensor(self.ends, dtype=torch.int64, device="cpu").numpy().data)
        return state.hexdigest()

    def shapes(self) -> list[int]:
        """All alike: shorter sequences are padded in their batch."""
        return [0] * len(self)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.ends[index - 1] if index else 0
        stored = self.tokens[start : self.ends[index]].long()
        special = stored < 0
        return {
            "input_ids": torch.where(special, -1 - stored, stored),
            "special_tokens_mask": special.long(),
        }


def iter_documents(config: DataConfig) -> Iterator[str]:
    """The documents that ``config`` names, at most ``config.documents`` of them, always in the same order.

    Raises :class:`ConfigError` when a source is missing, empty or malformed.
    """
    sources = [config.source] if isinstance(config.source, str) else config.source
    found = itertools.chain.from_iterable(_documents_of(source, config.text_field) for source in sources)
    return itertools.islice(found, config.documents or None)


def _documents_of(source: str, text_field: str) -> Iterator[str]:
    if source == STDLIB_DOCSTRINGS:
        return _stdlib_docstrings()
    return itertools.chain.from_iterable(_file_documents(file, text_field) for file in _files_of(source))


def _files_of(source: str) -> list[Path]:
    path = expanded(source)
    if path.is_dir():
        # Sorted: a directory lists its files in another order on each machine, and ranks compare what they
        # read.
        files = sorted(file for file in path.rglob("*") if file.suffix in (*_TEXT_SUFFIXES, ".jsonl"))
        if not files:
            raise ConfigError(f"data.source {source}: no .txt, .md, .rst or .jsonl file in this directory")
        return files
    if not path.is_file():
        raise ConfigError(f"data.source {source}: no such file or directory (nor {STDLIB_DOCSTRINGS!r})")
    return [path]


def file_digests(config: DataConfig) -> dict[str, str]:
    """A digest of each file of ``config.source``, by its name within its source, in their order.

    The standard library has one entry, its Python's version. Raises :class:`ConfigError` as `iter_documents`.
    """
    sources = [config.source] if isinstance(config.source, str) else config.source
    found: dict[str, str] = {}
    for source in sources:
        if source == STDLIB_DOCSTRINGS:
            found[f"the standard library of Python {platform.python_version()}"] = sys.version
            continue
        for file in _files_of(source):
            name = file.name if file == expanded(source) else file.relative_to(expanded(source)).as_posix()
            with file.open("rb") as content:
                found[name] = hashlib.file_digest(content, "blake2b").hexdigest()
    return found


def _file_documents(path: Path, text_field: str) -> Iterator[str]:
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8-sig")
            return
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _jsonl_text(line, text_field, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.source {path} is not UTF-8 text: {error.reason}") from error


def _jsonl_text(line: str, text_field: str, where: str) -> str:
    value = parsed_json(line, f"data.source {where}")
    if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
        raise ConfigError(f"data.source {where}: no text in field {text_field!r} (data.text_field names it)")
    text: str = value[text_field]
    return text


def _stdlib_docstrings() -> Iterator[str]:
    """Docstrings of the modules, classes and functions of the running Python's standard library.

    The modules come in the order of a hash of their path: a limited number of documents is then a sample
    of the whole library, and the same one on every machine with this Python.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file.relative_to(root) for file in root.rglob("*.py")]
    modules = [file for file in files if not _NOT_LIBRARY.intersection(file.parts)]
    for module in sorted(modules, key=lambda file: hashlib.sha256(file.as_posix().encode()).digest()):
        try:
            tree = ast.parse((root / module).read_bytes())
        except SyntaxError:  # a template or a file for another Python, not a module
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if docstring is not None and len(docstring) >= _SHORTEST_DOCSTRING:
                    yield docstring


def tokenize(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Sequences:
    """Token sequences of at most ``config.sequence_length``, packed to exactly that if ``config`` says so.

    ``tokenizer`` is a transformers tokenizer. Raises :class:`ConfigError` when no sequence results.
    """
    prefix, suffix = _special_tokens(tokenizer)
    room = config.sequence_length - len(prefix) - len(suffix)
    plain = _token_ids(documents, tokenizer)
    filled = filter(None, plain)  # an empty document would leave a separator
    pieces = _packed(filled, room, _separator(tokenizer)) if config.packing else _single(filled, room)
    start, end = (torch.tensor(part, dtype=torch.int32, device="cpu") for part in (prefix, suffix))
    flat: list[torch.Tensor] = []
    ends: list[int] = []
    for piece in pieces:
        # The sign says which tokens are special, without a second tensor as long.
        flat += [-1 - start, torch.tensor(piece, dtype=torch.int32, device="cpu"), -1 - end]
        # Where this one ends in all of them in a row, and the next begins.
        ends.append((ends[-1] if ends else 0) + len(prefix) + len(piece) + len(suffix))
    if not ends:
        raise ConfigError(
            f"data.source {config.source} has less than one sequence of {config.sequence_length} "
            "tokens; name more text or lower data.sequence_length"
        )
    return Sequences(torch.cat(flat), ends)


def _token_ids(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    remaining = iter(documents)
    while batch := list(itertools.islice(remaining, _BATCH)):
        # verbose=False: that a document is longer than the model's context is no news before packing.
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a sequence ([CLS] and [SEP], or nothing)."""
    plain = tokenizer("text", add_special_tokens=False)["input_ids"]
    full = tokenizer("text")["input_ids"]
    # Found by looking for the text's own tokens: tokenizers have no uniform way to say it.
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise ConfigError(
        "the tokenizer encodes a text differently with special tokens, so documents cannot be "
        "packed; set data.packing to false"
    )


def _separator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What goes between two documents of one sequence."""
    for token_id in (tokenizer.sep_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return [token_id]
    return []


def _packed(documents: Iterable[list[int]], room: int, separator: list[int]) -> Iterator[list[int]]:
    """Cut the joined documents into pieces of exactly ``room`` tokens; the last, short one is dropped."""
    held: list[int] = []
    for document in documents:
        held += [*document, *separator]
        whole = len(held) // room * room
        for start in range(0, whole, room):
            yield held[start : start + room]
        del held[:whole]


def _single(documents: Iterable[list[int]], room: int) -> Iterator[list[int]]:
    return (document[:room] for document in documents)


def split_held_out(sequences: Sequences, fraction: float) -> tuple[Sequences, Sequences | None]:
    """``(training, held out)``: the last ``fraction`` of the sequences, None when the fraction is 0.

    The last ones, not a random choice: packed neighbours may share a document. Raises ConfigError where
    none are left to train on.
    """
    if fraction == 0.0:
        return sequences, None
    held = max(1, round(len(sequences) * fraction))
    kept = len(sequences) - held
    if kept < 1:
        raise ConfigError(
            f"data.held_out {fraction} leaves none of {len(sequences)} sequences to train on; lower it"
        )
    # Ends of the rest count from where it begins.
    boundary = sequences.ends[kept - 1]
    rest = [end - boundary for end in sequences.ends[kept:]]
    return Sequences(sequences.tokens[:boundary], sequences.ends[:kept]), Sequences(
        sequences.tokens[boundary:], rest
    )
