"""What a rank on an accelerator does: every verb, on one engine; and what must have come of it."""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zerostart
from benchmarks.gpu_check import prepared, step

STEPS = 2


def join(backend: str | None, chosen: bool) -> torch.device:
    """A process group as a user's script makes it; with ``chosen`` the script also sets the device."""
    local = int(os.environ["LOCAL_RANK"])
    if chosen:
        torch.accelerator.set_device_index(local)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return torch.device("npu", local)


def all_verbs(
    path: Path,
    folder: Path,
    engine: str,
    stage: int,
    options: Mapping[str, Any],
    config: Any = None,
    backend: str | None = None,
    chosen: bool = False,
) -> list[float]:
    """Load, compare, digest, change, save, train, save and load the state, also beside a step; the losses."""
    from transformers import AutoModelForCausalLM

    device = join(backend, chosen)
    begun = zerostart.load(
        path, engine=engine, zero_stage=stage, engine_config=config, progress=False, **options
    )
    assert torch.accelerator.current_device_index() == device.index, "the rank's device is current"
    off = [name for name, at in places(begun) if at not in (device, torch.device("cpu"))]
    assert not off, f"elsewhere than on {device}: {off}"
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    compare(begun, expected)
    with zerostart.gathered(begun, "model.norm.weight", modifier_rank=0) as whole:
        if dist.get_rank() == 0:
            whole.mul_(2)
    with zerostart.gathered(begun, "model.norm.weight") as whole:
        assert torch.equal(whole.cpu(), expected["model.norm.weight"] * 2)

    model, optimizer = prepared(begun, engine, config)
    own_batch = dist.get_rank() if stage else 0  # nothing averages the gradients of whole models here
    losses = [step(model, optimizer, device, own_batch) for _ in range(STEPS)]
    zerostart.save(model, folder / "saved")
    saved = zerostart.digest(model)
    whole_tensors = dict(zerostart.full_tensors(model, rank=None))
    files = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    wrong = [name for name, tensor in files.items() if not torch.equal(tensor, whole_tensors[name])]
    assert not wrong, f"saved otherwise than it is: {wrong}"

    own = {} if engine == "deepspeed" else {"optimizer": optimizer}
    zerostart.save_state(folder / "state", model, extra={"step": STEPS}, **own)
    handle = zerostart.save_state(folder / "beside", model, extra={"step": STEPS}, wait=False, **own)
    after = step(model, optimizer, device, own_batch)
    handle.wait()
    assert zerostart.digest(model) != saved
    for state in ("state", "beside"):
        assert zerostart.load_state(folder / state, model, **own) == {"step": STEPS}
        assert zerostart.digest(model) == saved, f"what {state} brought back"
        assert step(model, optimizer, device, own_batch) == after, f"the step from {state} on"
    dist.barrier()
    dist.destroy_process_group()
    return [*losses, after]


def places(model: nn.Module) -> list[tuple[str, torch.device]]:
    """Where each share lies."""
    from zerostart.upstream.deepspeed.zero3_partitions import partition_of

    found = [(name, buffer.device) for name, buffer in model.named_buffers()]
    for name, parameter in model.named_parameters():
        state = partition_of(parameter)
        local = state[0] if state else parameter
        found.append((name, (local.to_local() if isinstance(local, DTensor) else local).device))
    return found


def compare(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """Every element is transformers' own."""
    seen = dict(zerostart.full_tensors(model, rank=None))
    assert seen.keys() == expected.keys()
    wrong = [name for name, tensor in seen.items() if not torch.equal(tensor, expected[name])]
    assert not wrong, f"changed by the load: {wrong}"
