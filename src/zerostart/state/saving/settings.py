"""What belongs into the directory of a checkpoint beside its weights: configurations, tokenizers, code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from torch import nn

from zerostart.errors import WriteError
from zerostart.models import library_of

#: What is copied from beside the weights that a model was loaded from: its tokenizer or processor, its code.
_KINDS = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe", ".spm"})
_FOLDERS = ("additional_chat_templates",)
#: What describes the weights that are saved anew, or a run, and not the model.
_NOT_COPIED = re.compile(
    r".*\.index\.json|(config|generation_config|adapter_config|trainer_state|state|zerostart|model_index)\.json"
    r"|(train|eval|test|all|predict)_results\.json|requirements\.txt|setup\.py"
)
#: A file of more bytes is no setting.
_MOST = 256 << 20


def save_settings(model: nn.Module, directory: Path, root: str, dtype: torch.dtype | None) -> None:
    """Write the settings of ``model`` into ``directory``, and copy what lies beside its source in ``root``.

    By the model's library's own functions; ``dtype`` is that of the weights in the files, None: as held. For
    one process. Raises WriteError.
    """
    try:
        written = library_of(model).save_settings(model, directory, dtype)
        if not written and root and (Path(root) / "config.json").is_file():
            shutil.copyfile(Path(root) / "config.json", directory / "config.json")
        if root:
            copy_beside(Path(root), directory)
    except OSError as error:
        raise WriteError(f"{directory}: the settings cannot be saved: {error}") from error


def copy_beside(root: Path, directory: Path) -> None:
    """Copy tokenizer, processor, chat template and code files, where ``directory`` has none of that name.

    Regular files alone, and of a folder those that lie in it: a stranger's links may lead to what has no end.
    """
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.suffix in _KINDS and not _NOT_COPIED.fullmatch(path.name):
            _copy(path, directory / path.name)
    for name in _FOLDERS:
        for path in sorted((root / name).iterdir()) if (root / name).is_dir() else ():
            _copy(path, directory / name / path.name)


def _copy(path: Path, to: Path) -> None:
    if path.is_file() and path.stat().st_size <= _MOST and not to.exists():
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, to)
