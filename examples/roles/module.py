"""A module of one's own, in shards, from its original checkpoint, which has q, k and v apart.

torchrun --nproc-per-node 2 module.py original.pt out
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import zerostart


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.out(nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1)))


def fused(state):  # runs on symbolic tensors: no weight is read here
    made = {}
    for n in range(2):
        made[f"{n}.qkv.weight"] = torch.cat([state[f"layers.{n}.attention.w{part}.weight"] for part in "qkv"])
        made[f"{n}.out.weight"] = state[f"layers.{n}.attention.wo.weight"]
    return made


source, out = sys.argv[1:]
dist.init_process_group()
model = zerostart.load(source, lambda: nn.Sequential(Block(), Block()), engine="fsdp2", converter=fused)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(1, 8, 64, device=next(model.parameters()).device)).square().mean().backward()
optimizer.step()
print(zerostart.save(model, out))  # as it came: wq, wk, wv, each rank its own bytes
dist.destroy_process_group()
