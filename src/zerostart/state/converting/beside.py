"""What comes along with the weights of a model: its configuration, tokenizer and code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
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


def beside(
    contents: Contents, dtype: torch.dtype | None, dequantised: bool
) -> Iterator[tuple[str, Path | bytes]]:
    """The files by name; the configuration says of dtype and quantisation what holds of the weights now."""
    root = Path(contents.root) if contents.root else None
    config = read_config(contents.root) if contents.root else None
    if root is None or config is None:
        return
    for path in sorted(root.iterdir()):
        wanted = path.name.endswith(_ENDS) and not path.name.endswith(".index.json")
        if path.is_file() and wanted and path.name not in _OF_THE_RUN:
            if path.name == "config.json" and "_class_name" not in config and (dtype or dequantised):
                yield path.name, _changed(config, dtype, dequantised)
            else:
                yield path.name, path


def _changed(config: JsonObject, dtype: torch.dtype | None, dequantised: bool) -> bytes:
    gone = {"torch_dtype"} if dtype is not None else set()
    # Readers would look for scales that the weights have taken in.
    gone |= {"quantization_config"} if dequantised else set()
    kept = {key: value for key, value in config.items() if key not in gone}
    if dtype is not None:
        kept["dtype"] = str(dtype).removeprefix("torch.")
    return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def copy_beside(files: Iterable[tuple[str, Path | bytes]], out: Path, but: Path | None = None) -> list[str]:
    """Copy the files to the directory ``out``, except those whose names ``but`` has; gives their names.

    Raises OSError.
    """
    names = []
    for name, item in files:
        if but is not None and (but / name).exists():
            continue
        if isinstance(item, bytes):
            (out / name).write_bytes(item)
        else:
            shutil.copyfile(item, out / name)
        names.append(name)
    return names
