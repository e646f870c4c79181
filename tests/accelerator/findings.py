"""What ranks do for ``test_findings``."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests.accelerator.verbs import join, places, prepared, step


def pretend() -> Any:
    """The compiled part of the pretend accelerator."""
    import torch_npu

    return torch_npu.device


def device_before_it_is_asked() -> tuple[bool, bool, int]:
    """Whether the accelerator is initialised after asking for the rank's device, and once that is current.

    And the device of a script that says it to its process group alone.
    """
    from zerostart.distributed.world import default_device

    default_device()
    asked = torch.npu.is_initialized()  # type: ignore[attr-defined]
    join(None, False)
    from zerostart.distributed.world import joined_world

    group: Any = dist.group.WORLD
    group.bound_device_id = torch.device("npu", 5)  # as init_process_group(device_id=...) leaves it
    bound = default_device().index
    group.bound_device_id = None
    joined_world()
    own = torch.accelerator.current_device_index() == dist.get_rank()
    dist.destroy_process_group()
    return asked, own, bound


def saved_beside_another_device(path: Path, folder: Path) -> bool:
    """Save in the background while the current device is another; return if that is what there was."""
    device = join(None, True)
    model = zerostart.load(path, engine="fsdp2", progress=False)
    _, optimizer = prepared(model, "fsdp2", None)
    step(model, optimizer, device)
    before = zerostart.digest(model)
    torch.accelerator.synchronize(device)
    pretend().set_delay(10**7)  # nothing happens unless somebody waits for it
    torch.accelerator.set_device_index(7)
    zerostart.save_state(folder, model, optimizer=optimizer, wait=False).wait()
    torch.accelerator.set_device_index(device)
    for at in range(8):
        torch.accelerator.synchronize(at)
    pretend().set_delay(20)
    step(model, optimizer, device)
    zerostart.load_state(folder, model, optimizer=optimizer)
    return zerostart.digest(model) == before


def page_locked(path: Path, folder: Path, engine: str, config: Any, background: bool) -> tuple[int, int, int]:
    """Bytes in page-locked shares; those that torch's allocator took, and those that were registered."""
    device = join("cpu:gloo,npu:hccl", True)
    model = zerostart.load(path, engine=engine, engine_config=config, progress=False)
    if background:
        model, optimizer = prepared(model, engine, config)
        step(model, optimizer, device)
        zerostart.save_state(folder, model, optimizer=optimizer, wait=False).wait()
        asked = sum(f.stat().st_size for f in folder.rglob("*.safetensors")) // dist.get_world_size()
    else:
        own = {
            share.data_ptr(): share.nbytes for share in shares(model) if share.is_pinned()
        }  # some are tied
        asked = sum(own.values())
        assert all(
            at.type == "cpu" for name, at in places(model) if "norm" not in name and "rotary" not in name
        )
    return asked, pretend().pinned_bytes(), pretend().registered_bytes()


def page_locked_by_torch(path: Path, folder: Path, config: Any) -> dict[str, int]:
    """Where pages cannot be registered: what is asked, what torch takes, and what is told of it."""
    import gc

    from zerostart.transfer.buffers import locked_bytes
    from zerostart.transfer.meter import release_cached

    device = join("cpu:gloo,npu:hccl", True)
    del torch.npu.npurt  # type: ignore[attr-defined]
    options: Any = {"engine": "fsdp2", "engine_config": config}
    plan = zerostart.plan(path, world_size=dist.get_world_size(), host_memory=1 << 40, **options)
    model: Any = zerostart.load(path, progress=False, **options)
    asked = sum({share.data_ptr(): share.nbytes for share in shares(model)}.values())
    found = {"asked": asked, "taken": pretend().pinned_bytes(), "told": locked_bytes()}
    found["forecast"] = plan.ranks[dist.get_rank()].memory["load"].host["parameters"]
    found["report"], found["peak"] = zerostart.report(model).peak_host_bytes, pretend().pinned_peak()
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device)
    del model
    gc.collect()
    release_cached()
    return {**found, "left": pretend().pinned_bytes()}


def offloaded_activations() -> tuple[list[float], int, int]:
    """Return how far gradients are off, the bytes needed, and the most bytes that were page-locked."""
    device = join(None, True)
    weight = torch.linspace(-1, 1, 100 * 100, device=device).view(100, 100).requires_grad_()

    def gradient(rows: int, offload: bool) -> float:
        weight.grad = None
        x: Any = torch.linspace(0, 1, rows * 100, device=device).view(rows, 100).requires_grad_()
        for _ in range(3):
            x = zerostart.gradient_checkpoint(lambda given: (given @ weight).tanh(), x, offload=offload)
        x.sum().backward()
        assert weight.grad is not None
        return float(weight.grad.abs().sum().item())

    off, registered = [], []
    for rows in (300, 300, 280, 300, 200, 170, 300):
        off.append(abs(gradient(rows, True) - gradient(rows, False)))
        registered.append(pretend().registered_bytes())
    dist.destroy_process_group()
    return off, 3 * 300 * 100 * 4, max(registered) + pretend().pinned_bytes()


def shares(model: torch.nn.Module) -> list[torch.Tensor]:
    from zerostart.engines.fsdp2.storage import current_shards
    from zerostart.upstream.deepspeed.zero3_partitions import partition_of

    if any(partition_of(p) for p in model.parameters()):
        return [state[0] for p in model.parameters() if (state := partition_of(p))]
    return [shard.storage for shard in current_shards(model).values()]


def moved_between_two_devices(folder: Path) -> list[str]:
    """Save a model on two devices; return the tensors with other values in the files."""
    from safetensors.torch import load_file
    from torch import nn

    join(None, True)
    model = nn.Module()
    for number in range(8):
        values = torch.rand(500, 1000, device="cpu").to(f"npu:{number % 2}")
        model.register_parameter(f"p{number}", nn.Parameter(values))
    wanted = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    zerostart.save(model, folder)
    dist.destroy_process_group()
    saved = load_file(folder / "model.safetensors")
    return [name for name, tensor in wanted.items() if not torch.equal(tensor, saved[name])]
