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


def saved_beside_another_device(path: Path, folder: Path, waits: bool = True) -> bool:
    """A background save while the current device is another: whether what was written is what there was.

    Without ``waits`` what zerostart waits for is left out, which has to show.
    """
    device = join(None, True)
    model = zerostart.load(path, engine="fsdp2", progress=False)
    _, optimizer = prepared(model, "fsdp2", None)
    step(model, optimizer, device)
    before = zerostart.digest(model)
    torch.accelerator.synchronize(device)
    pretend().set_delay(10**7)  # nothing happens unless somebody waits for it
    torch.accelerator.set_device_index(7)
    synchronize = torch.accelerator.synchronize
    if not waits:
        torch.accelerator.synchronize = lambda _=None: None
    handle = zerostart.save_state(folder, model, optimizer=optimizer, wait=False)
    handle.wait()
    torch.accelerator.synchronize = synchronize
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


def page_locked_goes(path: Path, folder: Path) -> tuple[set[int], int, int, int]:
    """Devices that are waited for, what a peak counts, how a fork ends, and what is given back."""
    import gc
    import os
    import signal

    from zerostart.transfer import page_locked as locked
    from zerostart.transfer.meter import anonymous_bytes

    device = join("cpu:gloo,npu:hccl", True)
    waited: set[int] = set()
    synchronize = torch.accelerator.synchronize

    def noted(given: Any = None) -> None:
        index = given.index if isinstance(given, torch.device) else given
        waited.add(torch.accelerator.current_device_index() if index is None else index)
        synchronize(given)

    torch.accelerator.synchronize = noted
    try:
        model = zerostart.load(path, engine="fsdp2", progress=False)
        model, optimizer = prepared(model, "fsdp2", None)
        step(model, optimizer, device)
        zerostart.save_state(folder, model, optimizer=optimizer, wait=False).wait()
        del model, optimizer
        gc.collect()
    finally:
        torch.accelerator.synchronize = synchronize
    before = anonymous_bytes()
    pages = locked(64 << 20)
    counted = anonymous_bytes() - before
    child = os.fork()
    if not child:
        signal.alarm(30)  # which ends it, where it waits for a device that its parent alone has
        registered = pretend().registered_bytes()
        del pages
        os._exit(0 if pretend().registered_bytes() == registered else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    registered = pretend().registered_bytes()
    del pages
    return waited, counted, status, registered - pretend().registered_bytes()


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


def states_page_locked(path: Path, stage: int, config: Any) -> tuple[int, dict[str, int]]:
    """What DeepSpeed has page-locked after ``initialize``, and what was foreseen on the host."""
    join("cpu:gloo,npu:hccl", True)
    options: Any = {"engine": "deepspeed", "zero_stage": stage, "engine_config": config}
    plan = zerostart.plan(path, world_size=dist.get_world_size(), **options)
    model = zerostart.load(path, progress=False, **options)
    assert not pretend().pinned_bytes()
    engine = prepared(model, "deepspeed", config)
    found = pretend().pinned_bytes()
    del engine
    return found, dict(plan.ranks[dist.get_rank()].memory["initialize"].host)


def on_a_mesh_of_the_host(path: Path) -> tuple[str, bool]:
    """Where a load with a mesh of CPUs lies, and whether it has begun an accelerator."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = zerostart.load(path, engine="fsdp2", engine_config={"mesh": mesh}, progress=False)
    zerostart.digest(model)
    kinds = {at.type for _, at in places(model)}
    dist.destroy_process_group()
    return " ".join(sorted(kinds)), torch.npu.is_initialized()  # type: ignore[attr-defined]


def ring_without_kernels(path: Path) -> str:
    """What a load says whose device has no attention that torch's ring knows."""
    import torch_npu

    join(None, False)
    torch_npu.attention._destroy()
    try:
        zerostart.load(path, engine="fsdp2", sequence_parallel=2, progress=False)
    except zerostart.errors.ConfigError as error:
        return str(error)
    return ""


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


def peaks_stay(path: Path) -> tuple[int, int, int | None]:
    """The user's own peak before and after a load, and the load's."""
    device = join(None, True)
    torch.empty(40 << 20, dtype=torch.uint8, device=device)
    before = torch.accelerator.max_memory_allocated(device)
    model = zerostart.load(path, engine="fsdp2", progress=False)
    return before, torch.accelerator.max_memory_allocated(device), zerostart.report(model).peak_device_bytes


def waits_of_dispatch() -> tuple[int, bool]:
    """How often the host waits in an exchange of tokens, there and back, and whether they come back right."""
    from torch import nn

    from zerostart.engines.exchange import exchange_tokens

    class Experts(nn.Module):
        num_experts = 4

        def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return tokens * (index + 1 + 2 * dist.get_rank()) * weights

    device = join(None, True)
    experts = Experts()
    exchange_tokens(experts, dist.group.WORLD, [2, 2])
    tokens = torch.ones(6, 3, device=device, requires_grad=True)
    index = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1], [2, 3]], device=device)
    weights = torch.ones(6, 2, device=device)
    experts(tokens, index, weights)
    torch.accelerator.synchronize(device)
    before = pretend().waits()
    out = experts(tokens, index, weights)
    out.sum().backward()
    waits = pretend().waits() - before
    expected = (index + 1).sum(dim=1, keepdim=True).expand(6, 3).to(out.dtype)
    return waits, torch.equal(out, expected)


def refitted_in_part_there() -> tuple[list[int], list[str], int, int]:
    """Versions of an engine of which one tensor is on the host, and what it has not got of them.

    And bytes that are page-locked meanwhile, and when nobody has closed anything, but all of it is gone.
    """
    import gc
    import tempfile
    import threading

    from torch import nn

    from zerostart import serving

    device = join(None, True)

    class Part(nn.Module):
        def __init__(self, *places: Any) -> None:
            super().__init__()
            for name, place in zip("abc", places, strict=True):
                setattr(self, name, nn.Parameter(torch.rand(300, 100, device="cpu").to(place)))

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    model, engine = Part(device, "cpu", device), Part("cpu", device, device)
    versions: list[int] = []

    def pushed() -> int:
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix://{folder}/worker"

            def follow() -> None:
                connection = serving.Connection(serving.Receiver(engine), address, timeout=30)
                versions.extend(connection.follow() for _ in range(2))

            worker = threading.Thread(target=follow)
            worker.start()
            refitter = zerostart.refit(model, address, workers=1, timeout=30)
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.data.mul_(-2)
                refitter.push()
            worker.join()
            return int(pretend().registered_bytes())

    before = pretend().registered_bytes()
    locked = pushed() - before
    gc.collect()
    pairs = zip(model.named_parameters(), engine.parameters(), strict=True)
    wrong = [name for (name, mine), its in pairs if not torch.equal(mine.cpu(), its.cpu())]
    dist.destroy_process_group()
    return versions, wrong, locked, pretend().registered_bytes() - before


def moved_between_two_devices(folder: Path) -> tuple[list[str], list[str]]:
    """What a save of a model on two devices has not, and what another one, refitted, has not."""
    from safetensors.torch import load_file
    from torch import nn

    def spread(*devices: int) -> nn.Module:
        model = nn.Module()
        for number in range(8):
            values = torch.rand(500, 1000, device="cpu").to(f"npu:{devices[number % len(devices)]}")
            model.register_parameter(f"p{number}", nn.Parameter(values))
        return model

    def differing(others: Any) -> list[str]:
        return [name for name, mine in values.items() if not torch.equal(mine, others[name].cpu())]

    join(None, True)
    model, other = spread(0, 1), spread(1, 0, 0)
    values = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    zerostart.save(model, folder)
    saved = differing(load_file(folder / "model.safetensors"))
    with zerostart.refit(model, other) as refitter:
        refitter.push()
    dist.destroy_process_group()
    return saved, differing(dict(other.named_parameters()))
