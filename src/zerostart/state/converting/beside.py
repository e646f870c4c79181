"""What comes along with the weights of a model: its configuration, tokenizer and code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from zerostart.checkpoint.source import read_config
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.state.converting.contents import Contents

#: Files beside the weights that belong to a model: with these ends.
_ENDS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
#: What of them a training run leaves, and no model has.
_OF_THE_RUN = (
    "state.json",
    "zerostart.json",
    "trainer_state.json",
    "all_results.json",
    "zero_to_fp32.py",
    "zero_to_torch.py",
)


def beside(contents: Contents, dtype: torch.dtype | None) -> Iterator[tuple[str, Path | bytes]]:
    """The files by name; in the configuration the dtype of the weights now."""
    root = Path(contents.root) if contents.root else None
    config = read_config(contents.root) if contents.root else None
    if root is None or config is None:
        return
    for path in sorted(root.iterdir()):
        wanted = path.name.endswith(_ENDS) and not path.name.endswith(".index.json")
        if path.is_file() and wanted and path.name not in _OF_THE_RUN:
            if path.name == "config.json" and dtype is not None and "_class_name" not in config:
                yield path.name, _with_dtype(config, dtype)
            else:
                yield path.name, path


def _with_dtype(config: JsonObject, dtype: torch.dtype) -> bytes:
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    text = json.dumps({**kept, "dtype": str(dtype).removeprefix("torch.")}, indent=2, ensure_ascii=False)
    return (text + "\n").encode()


def copy_beside(
    contents: Contents, out: Path, dtype: torch.dtype | None, but: Path | None = None
) -> list[str]:
    """Copy the files to the directory ``out``, except those whose names ``but`` has; gives their names.

    Raises OSError.
    """
    names = []
    for name, item in beside(contents, dtype):
        if but is not None and (but / name).exists():
            continue
        if isinstance(item, bytes):
            (out / name).write_bytes(item)
        else:
            shutil.copyfile(item, out / name)
        names.append(name)
    return names
