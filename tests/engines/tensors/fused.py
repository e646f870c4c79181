"""A plain module with fused layers of unequal parts.

Its forward reads widths from its layers' outputs, so that it also works with sliced layers.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

HEAD = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(16, 64)
        self.o_proj = nn.Linear(32, 16)
        self.up_proj = nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv_proj(x)
        quarter = fused.shape[-1] // 4
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in fused.split([2 * quarter, quarter, quarter], dim=-1)
        )
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(x)))


class Fused(nn.Module):
    """Two blocks with four query heads and two heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 96)

    @classmethod
    def build(cls) -> "Fused":
        return cls()

    @classmethod
    def from_file(cls, path: Path) -> "Fused":
        model = cls()
        model.load_state_dict(load_file(path))
        return model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def write_fused_file(folder: Path) -> Path:
    """Write random weights of the module."""
    path = folder / "fused.safetensors"
    if not path.exists():
        torch.manual_seed(0)
        save_file(Fused().state_dict(), path)
    return path
