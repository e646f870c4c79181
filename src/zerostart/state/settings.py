"""What belongs into the directory of a checkpoint beside its weights: configurations, tokenizers, code."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.errors import WriteError
from zerostart.models import is_diffusers, is_pretrained

__all__ = ["copy_beside", "save_settings"]

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
        if is_pretrained(model):
            _save_pretrained(model, directory, dtype)
        elif is_diffusers(model):
            described: Any = model
            described.save_config(directory)
        elif root and (Path(root) / "config.json").is_file():
            shutil.copyfile(Path(root) / "config.json", directory / "config.json")
        if root:
            copy_beside(Path(root), directory)
    except OSError as error:
        raise WriteError(f"{directory}: the settings cannot be saved: {error}") from error


def copy_beside(root: Path, directory: Path) -> None:
    """Copy tokenizer, processor, chat template and code files, where ``directory`` has none of that name."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.suffix not in _KINDS or _NOT_COPIED.fullmatch(path.name) or not path.is_file():
            continue
        if path.stat().st_size <= _MOST and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)
    for name in _FOLDERS:
        if (root / name).is_dir():
            shutil.copytree(root / name, directory / name, dirs_exist_ok=True)


def _save_pretrained(model: Any, directory: Path, dtype: torch.dtype | None) -> None:
    """As ``save_pretrained`` of transformers leaves them; the model's own configuration stays as it is."""
    config = copy.deepcopy(model.config)
    held = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    config.dtype = dtype or held or config.dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
