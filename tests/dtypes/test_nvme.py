"""Masters that DeepSpeed keeps on NVMe start from the stored values too, a sub-group at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests import file_aio
from tests.dtypes.test_masters import config_of, masters_in, unlike
from tests.ranks import run_ranks

WIDTH = 1100  # Square layers, of which half a layer in fp32 is above the least size that is swapped, 1 MiB.


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values.float().square().mean()


def swapped(folder: Path, pipelined: bool) -> Any:
    import deepspeed

    file_aio.install()
    torch.manual_seed(0)
    stored = {name: p.detach() for name, p in Layers().named_parameters()}
    nvme: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder)}
    if pipelined:
        nvme |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
    config = config_of(offload_optimizer=nvme, sub_group_size=WIDTH * WIDTH // 3)
    model = zerostart.load(
        stored, model=Layers, dtype=torch.bfloat16, engine_config=config_of(), progress=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    zero = engine.optimizer
    count = sum(zero._swappable_optimizer_subgroup(i) for i in range(len(zero.fp16_groups)))
    before = unlike(masters_in(model), stored)
    loss = engine(torch.randn(4, WIDTH, dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step()
    moved = [name for name, tensor in masters_in(model).items() if torch.equal(tensor, stored[name])]
    return count, before, moved


@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
def test_masters_on_nvme_are_what_the_checkpoint_stores(pipelined: bool, tmp_path: Path) -> None:
    for count, before, unmoved in run_ranks(swapped, 2, tmp_path, pipelined):
        assert count >= 3
        assert before == []
        assert unmoved == []
