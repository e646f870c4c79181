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


def truncate_shard(folder: Path) -> str:
    file = shard_files(folder)[-1]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    return file.name


def remove_shard(folder: Path) -> str:
    file = shard_files(folder)[-1]
    file.unlink()
    return file.name


def write_enormous_header(folder: Path) -> str:
    file = shard_files(folder)[-1]
    with file.open("r+b") as stream:
        stream.write(struct.pack("<Q", 1 << 60))
    return file.name


def write_invalid_header(folder: Path) -> str:
    file = shard_files(folder)[-1]
    with file.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"not json")
    return file.name


Q_PROJ, K_PROJ = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
EXPERTS = "model.layers.2.mlp.experts"


def edit_tensor(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    def edit_one(tensors: dict[str, Any]) -> None:
        if name in tensors:
            tensors[name] = edit(tensors[name])

    edit_tensors(folder, edit_one)


def delete_tensor(folder: Path, name: str) -> None:
    """Delete a tensor, also from the index."""
    edit_tensors(folder, lambda tensors: tensors.pop(name, None))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        listed["weight_map"].pop(name)
        index.write_text(json.dumps(listed))


def change_shape(folder: Path) -> str:
    edit_tensor(folder, Q_PROJ, lambda tensor: tensor[:-1].contiguous())
    return Q_PROJ


def change_expert_shape(folder: Path) -> str:
    """Double the rows of one expert."""
    edit_tensor(folder, f"{EXPERTS}.3.up_proj.weight", lambda tensor: tensor.repeat(2, 1))
    return EXPERTS


def delete_weight(folder: Path) -> str:
    delete_tensor(folder, K_PROJ)
    return K_PROJ


def delete_expert(folder: Path) -> str:
    """Delete one source of a fused parameter."""
    delete_tensor(folder, f"{EXPERTS}.1.gate_proj.weight")
    return EXPERTS


def point_index_outside(folder: Path) -> str:
    """Point the index to a file outside the checkpoint."""
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(listed))
    return "elsewhere.safetensors"


#: Functions that break a copy of a sharded tiny Qwen3-MoE, and return the name for the message.
BREAKAGES: dict[str, Callable[[Path], str]] = {
    "truncated": truncate_shard,
    "missing-shard": remove_shard,
    "enormous-header": write_enormous_header,
    "header-not-json": write_invalid_header,
    "wrong-shape": change_shape,
    "wrong-expert-shape": change_expert_shape,
    "lost-tensor": delete_weight,
    "lost-expert": delete_expert,
    "index-outside": point_index_outside,
}


def break_copy(source: Path, root: Path, breakage: str) -> tuple[Path, str]:
    """Break a copy; return it and the name to report."""
    folder = root / breakage
    shutil.copytree(source, folder)
    return folder, BREAKAGES[breakage](folder)
