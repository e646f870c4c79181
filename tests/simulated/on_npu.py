"""What depends on the kind of device, on one that computes (``npu/torch_npu``). Prints one JSON object."""

from __future__ import annotations

import json

import torch

import zerostart
from zerostart.distributed.world import default_device
from zerostart.state.resuming.training_state import random_rows, set_random_rows


def gradient(checkpointed: bool, offload: bool = False) -> torch.Tensor:
    """Of a function that drops out at random."""
    torch.manual_seed(5)
    weight = torch.randn(64, 64, device="npu", requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ weight, 0.5).tanh()

    x = torch.ones(64, 64, device="npu", requires_grad=True)
    out = zerostart.gradient_checkpoint(run, x, offload=offload) if checkpointed else run(x)
    torch.rand(3, device="npu")
    out.sum().backward()
    assert weight.grad is not None
    return weight.grad.cpu()


def main() -> None:
    torch.manual_seed(3)
    rows = random_rows()
    first, host = torch.rand(4, device="npu").cpu(), torch.rand(4, device="cpu")
    second = torch.rand(4, device="npu").cpu()
    set_random_rows(rows)
    again, hosts = torch.rand(4, device="npu").cpu(), torch.rand(4, device="cpu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        lower = torch.nn.Linear(4, 4, device="npu")(torch.ones(2, 4, device="npu")).dtype
    plain = gradient(False)
    found = {
        "device": str(default_device()),
        "rows": sorted(rows),
        "again": torch.equal(first, again) and not torch.equal(first, second),
        "host": torch.equal(host, hosts),
        "lower": str(lower),
        "checkpointed": torch.equal(plain, gradient(True)),
        "offloaded": torch.equal(plain, gradient(True, offload=True)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
