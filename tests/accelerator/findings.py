"""Functions that the ranks of ``test_findings`` run."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests.accelerator.verbs import join, places, prepare_training, step


def pretend_device() -> Any:
    """Return the compiled part of the pretend accelerator."""
    import torch_npu

    return torch_npu.device


def check_current_device() -> tuple[bool, bool, int]:
    """Return: asking initialises, the device is current, index of a bound device."""
    from zerostart.distributed.world import default_device

    default_device()
    initialised = torch.npu.is_initialized()  # type: ignore[attr-defined]
    join(None, False)
    from zerostart.distributed.world import joined_world

    group: Any = dist.group.WORLD
    group.bound_device_id = torch.device("npu", 5)  # set by init_process_group(device_id=...)
    bound = default_device().index
    group.bound_device_id = None
    joined_world()
    is_current = torch.accelerator.current_device_index() == dist.get_rank()
    dist.destroy_process_group()
    return initialised, is_current, bound


def save_with_another_current_device(path: Path, folder: Path) -> bool:
    """Save in the background with another current device; return True if correct."""
    device = join(None, True)
    model = zerostart.load(path, engine="fsdp2", progress=False)
    _, optimizer = prepare_training(model, "fsdp2", None)
    step(model, optimizer, device)
    before = zerostart.digest(model)
    torch.accelerator.synchronize(device)
    pretend_device().set_delay(10**7)  # copies happen only when somebody waits for them
    torch.accelerator.set_device_index(7)
    zerostart.save_state(folder, model, optimizer=optimizer, wait=False).wait()
    torch.accelerator.set_device_index(device)
    for at in range(8):
        torch.accelerator.synchronize(at)
    pretend_device().set_delay(20)
    step(model, optimizer, device)
    zerostart.load_state(folder, model, optimizer=optimizer)
    return zerostart.digest(model) == before


def measure_page_locked(
    path: Path, folder: Path, engine: str, config: Any, background: bool
) -> tuple[int, int, int]:
    """Return page-locked bytes: in shares, taken by torch's allocator, and registered."""
    device = join("cpu:gloo,npu:hccl", True)
    model = zerostart.load(path, engine=engine, engine_config=config, progress=False)
    if background:
        model, optimizer = prepare_training(model, engine, config)
        step(model, optimizer, device)
        zerostart.save_state(folder, model, optimizer=optimizer, wait=False).wait()
        needed = sum(f.stat().st_size for f in folder.rglob("*.safetensors")) // dist.get_world_size()
    else:
        sizes = {share.data_ptr(): share.nbytes for share in shares(model) if share.is_pinned()}
        needed = sum(sizes.values())  # ties count once
        assert all(
            place.type == "cpu"
            for name, place in places(model)
            if "norm" not in name and "rotary" not in name
        )
    return needed, pretend_device().pinned_bytes(), pretend_device().registered_bytes()


def measure_page_locked_by_torch(path: Path, folder: Path, config: Any) -> dict[str, int]:
    """Return needed, taken and reported bytes where pages cannot be registered."""
    import gc

    from zerostart.transfer.buffers import locked_bytes
    from zerostart.transfer.meter import release_cached

    device = join("cpu:gloo,npu:hccl", True)
    del torch.npu.npurt  # type: ignore[attr-defined]
    options: Any = {"engine": "fsdp2", "engine_config": config}
    model: Any = zerostart.load(path, progress=False, **options)
    needed = sum({share.data_ptr(): share.nbytes for share in shares(model)}.values())
    sizes = {"needed": needed, "taken": pretend_device().pinned_bytes(), "locked": locked_bytes()}
    sizes["report"], sizes["peak"] = zerostart.report(model).peak_host_bytes, pretend_device().pinned_peak()
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device)
    del model
    gc.collect()
    release_cached()
    return {**sizes, "after": pretend_device().pinned_bytes()}


def measure_offloaded_activations() -> tuple[list[float], int, int]:
    """Return errors of gradients, the bytes needed, and the most bytes page-locked."""
    device = join(None, True)
    weight = torch.linspace(-1, 1, 100 * 100, device=device).view(100, 100).requires_grad_()

    def gradient(rows: int, offload: bool) -> float:
        weight.grad = None
        x: Any = torch.linspace(0, 1, rows * 100, device=device).view(rows, 100).requires_grad_()
        for _ in range(3):
            x = zerostart.gradient_checkpoint(lambda t: (t @ weight).tanh(), x, offload=offload)
        x.sum().backward()
        assert weight.grad is not None
        return float(weight.grad.abs().sum().item())

    errors, registered = [], []
    for rows in (300, 300, 280, 300, 200, 170, 300):
        errors.append(abs(gradient(rows, True) - gradient(rows, False)))
        registered.append(pretend_device().registered_bytes())
    dist.destroy_process_group()
    return errors, 3 * 300 * 100 * 4, max(registered) + pretend_device().pinned_bytes()


def shares(model: torch.nn.Module) -> list[torch.Tensor]:
    from zerostart.engines.fsdp2.storage import current_shards
    from zerostart.upstream.deepspeed.zero3_partitions import partition_of

    if any(partition_of(p) for p in model.parameters()):
        return [state[0] for p in model.parameters() if (state := partition_of(p))]
    return [shard.storage for shard in current_shards(model).values()]


def save_from_two_devices(folder: Path) -> list[str]:
    """Save a model on two devices; return the names of tensors with wrong values."""
    from safetensors.torch import load_file
    from torch import nn

    join(None, True)
    model = nn.Module()
    for number in range(8):
        values = torch.rand(500, 1000, device="cpu").to(f"npu:{number % 2}")
        model.register_parameter(f"p{number}", nn.Parameter(values))
    expected = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    zerostart.save(model, folder)
    dist.destroy_process_group()
    saved = load_file(folder / "model.safetensors")
    return [name for name, tensor in expected.items() if not torch.equal(tensor, saved[name])]
