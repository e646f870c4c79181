"""Checkpoints that are broken in one way each."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny import edit_tensors


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def truncate(folder: Path) -> str:
    file = shard_files(folder)[-1]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    return file.name


def remove(folder: Path) -> str:
    file = shard_files(folder)[-1]
    file.unlink()
    return file.name


def enormous_header(folder: Path) -> str:
    file = shard_files(folder)[-1]
    with file.open("r+b") as stream:
        stream.write(struct.pack("<Q", 1 << 60))
    return file.name


def header_not_json(folder: Path) -> str:
    file = shard_files(folder)[-1]
    with file.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"not json")
    return file.name


Q_PROJ, K_PROJ = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
EXPERTS = "model.layers.2.mlp.experts"


def change(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    def edit_one(tensors: dict[str, Any]) -> None:
        if name in tensors:
            tensors[name] = edit(tensors[name])

    edit_tensors(folder, edit_one)


def lose(folder: Path, name: str) -> None:
    """Delete a tensor, from the index as well."""
    edit_tensors(folder, lambda tensors: tensors.pop(name, None))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        listed["weight_map"].pop(name)
        index.write_text(json.dumps(listed))


def wrong_shape(folder: Path) -> str:
    change(folder, Q_PROJ, lambda tensor: tensor[:-1].contiguous())
    return Q_PROJ


def wrong_expert_shape(folder: Path) -> str:
    """One expert of a fused parameter has twice the rows."""
    change(folder, f"{EXPERTS}.3.up_proj.weight", lambda tensor: tensor.repeat(2, 1))
    return EXPERTS


def lost_tensor(folder: Path) -> str:
    lose(folder, K_PROJ)
    return K_PROJ


def lost_expert(folder: Path) -> str:
    """The fused parameter has all of its sources but one."""
    lose(folder, f"{EXPERTS}.1.gate_proj.weight")
    return EXPERTS


def index_outside(folder: Path) -> str:
    """The index sends one tensor to a file outside the checkpoint."""
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(listed))
    return "elsewhere.safetensors"


#: Each breaks a copy of a sharded tiny Qwen3-MoE and returns what the message has to name.
BREAKAGES: dict[str, Callable[[Path], str]] = {
    "truncated": truncate,
    "missing-shard": remove,
    "enormous-header": enormous_header,
    "header-not-json": header_not_json,
    "wrong-shape": wrong_shape,
    "wrong-expert-shape": wrong_expert_shape,
    "lost-tensor": lost_tensor,
    "lost-expert": lost_expert,
    "index-outside": index_outside,
}


def broken_copy(source: Path, root: Path, breakage: str) -> tuple[Path, str]:
    """A copy of a checkpoint, broken; and the name that an error about it must contain."""
    folder = root / breakage
    shutil.copytree(source, folder)
    return folder, BREAKAGES[breakage](folder)
