"""Run every verb on an accelerator rank with one engine, and check the results."""

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
from benchmarks.gpu_check import prepare_training, step

STEPS = 2


def join(backend: str | None, set_device: bool) -> torch.device:
    """Initialise the process group like a user's script; ``set_device`` sets the device first."""
    local = int(os.environ["LOCAL_RANK"])
    if set_device:
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
    set_device: bool = False,
) -> list[float]:
    """Load, compare, change, train, save, and save and load the state; return losses."""
    from transformers import AutoModelForCausalLM

    device = join(backend, set_device)
    loaded = zerostart.load(
        path, engine=engine, zero_stage=stage, engine_config=config, progress=False, **options
    )
    assert torch.accelerator.current_device_index() == device.index, "the rank's device is current"
    misplaced = [name for name, at in places(loaded) if at not in (device, torch.device("cpu"))]
    assert not misplaced, f"not on {device}: {misplaced}"
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    compare(loaded, expected)
    with zerostart.gathered(loaded, "model.norm.weight", modifier_rank=0) as whole:
        if dist.get_rank() == 0:
            whole.mul_(2)
    with zerostart.gathered(loaded, "model.norm.weight") as whole:
        assert torch.equal(whole.cpu(), expected["model.norm.weight"] * 2)

    model, optimizer = prepare_training(loaded, engine, config)
    own_batch = dist.get_rank() if stage else 0  # gradients of whole models are not averaged here
    losses = [step(model, optimizer, device, own_batch) for _ in range(STEPS)]
    zerostart.save(model, folder / "saved")
    saved = zerostart.digest(model)
    whole_tensors = dict(zerostart.full_tensors(model, rank=None))
    files = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    differing = [name for name, tensor in files.items() if not torch.equal(tensor, whole_tensors[name])]
    assert not differing, f"saved with other values: {differing}"

    optimizer_option = {} if engine == "deepspeed" else {"optimizer": optimizer}
    zerostart.save_state(folder / "state", model, extra={"step": STEPS}, **optimizer_option)
    handle = zerostart.save_state(
        folder / "background", model, extra={"step": STEPS}, wait=False, **optimizer_option
    )
    after = step(model, optimizer, device, own_batch)
    handle.wait()
    assert zerostart.digest(model) != saved
    for state in ("state", "background"):
        assert zerostart.load_state(folder / state, model, **optimizer_option) == {"step": STEPS}
        assert zerostart.digest(model) == saved, f"values loaded from {state}"
        assert step(model, optimizer, device, own_batch) == after, f"the step after loading {state}"
    dist.barrier()
    dist.destroy_process_group()
    return [*losses, after]


def places(model: nn.Module) -> list[tuple[str, torch.device]]:
    """Return the device of each buffer and each parameter's share."""
    from zerostart.upstream.deepspeed.zero3_partitions import partition_of

    devices = [(name, buffer.device) for name, buffer in model.named_buffers()]
    for name, parameter in model.named_parameters():
        state = partition_of(parameter)
        local = state[0] if state else parameter
        devices.append((name, (local.to_local() if isinstance(local, DTensor) else local).device))
    return devices


def compare(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the gathered tensors equal ``expected``."""
    actual = dict(zerostart.full_tensors(model, rank=None))
    assert actual.keys() == expected.keys()
    differing = [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])]
    assert not differing, f"changed by the load: {differing}"
