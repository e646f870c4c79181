"""Load one parameter that is larger than a rank's memory limit, on every placement.

The matrix has an odd number of rows and columns: no world size divides it, so every last rank has padding.
The expected elements are computed from their positions.
"""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests import file_aio
from tests.ranks import run_ranks

MIB = 1 << 20
SIDE = 11777
NUMEL = SIDE * SIDE
PIECE = 1 << 22

HOST_OFFLOAD = {"device": "cpu", "pin_memory": False}
PLACEMENTS = ("zero3", "offload-param", "nvme", "fsdp2")
FAST = [("zero3", 2), ("fsdp2", 2)]
SLOW_PLACEMENTS = ("hierarchical", "prebuilt", "inside-zero.Init", "fsdp2-offload")
CASES: list[Any] = [
    *FAST,
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *((placement, world) for placement in PLACEMENTS for world in (1, 2, 3)),
            *((placement, 2) for placement in SLOW_PLACEMENTS),
            ("hierarchical", 3),
        ]
        if case not in FAST
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """File of one fp32 matrix of 529 MiB, deleted afterwards."""
    file_path = tmp_path_factory.mktemp("oversized") / "model.safetensors"
    entry = {"dtype": "F32", "shape": [SIDE, SIDE], "data_offsets": [0, 4 * NUMEL]}
    header = json.dumps({"weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    with file_path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, NUMEL, PIECE):
            file.write(elements(start, min(PIECE, NUMEL - start)).tobytes())
    yield file_path
    file_path.unlink()


def elements(start: int, count: int) -> Any:
    """Return ``count`` elements of the matrix from ``start``: finite and all different."""
    return (np.arange(start, start + count, dtype=np.uint32) + np.uint32(1 << 28)).view(np.float32)


@pytest.mark.parametrize(("case", "world_size"), CASES)
def test_one_parameter_larger_than_the_memory_limit(
    case: str, world_size: int, path: Path, tmp_path: Path
) -> None:
    share = -(-NUMEL // world_size) * 4 if not case.startswith("fsdp2") else -(-SIDE // world_size) * SIDE * 4
    if case != "nvme" and world_size > 1:
        assert share + 256 * MIB < 4 * NUMEL  # the cap is smaller than the parameter
    for peak, gathered in run_ranks(load_and_gather, world_size, case, path, share, tmp_path, timeout=280):
        assert peak <= share + 64 * MIB, f"{(peak - share) / MIB:.1f} MiB in addition to the partition"
        assert gathered


def load_and_gather(case: str, path: Path, share: int, folder: Path) -> tuple[int, bool]:
    engine, config = configuration(case, folder)
    warm_up(engine, config)
    # DeepSpeed allocates its swap buffer, of one partition, twice, and never touches the first.
    template = share if case == "nvme" else 0
    with memory_cap(share + template + 256 * MIB):
        model = load_matrix(case, path, engine, config)
    peak = zerostart.report(model).peak_host_bytes
    return peak, all(equals_file(whole) for whole in gathered_twice(model, engine))


def configuration(case: str, folder: Path) -> tuple[str, dict[str, Any]]:
    if case.startswith("fsdp2"):
        from torch.distributed.fsdp import CPUOffloadPolicy

        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if "offload" in case else {}
        return "fsdp2", policy
    # DeepSpeed swaps a partition through a buffer of at least its size.
    buffer_size = -(-NUMEL // dist.get_world_size() // 4096) * 4096 + 4096
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 1, "buffer_size": buffer_size}
    zero = {
        "offload-param": {"offload_param": HOST_OFFLOAD},
        "nvme": {"offload_param": {**nvme, "pin_memory": False}},
        "hierarchical": {"zero_hpz_partition_size": dist.get_world_size()},
    }
    if case == "nvme" and not file_aio.is_compilable():
        file_aio.install()
    return "deepspeed", {"zero_optimization": {"stage": 3, **zero.get(case, {})}}


def warm_up(engine: str, config: dict[str, Any]) -> None:
    """Load a small model first, so that imports are not measured."""
    small = {"weight": torch.zeros(3, 3)}
    plain = {"zero_optimization": {"stage": 3}} if engine == "deepspeed" else {}
    plain = {**plain, "zero_optimization": config["zero_optimization"]} if "hpz" in str(config) else plain
    zerostart.load(small, model=matrix(3), engine=engine, engine_config=plain, progress=False)


def matrix(side: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(side, side, bias=False)


def load_matrix(case: str, path: Path, engine: str, config: dict[str, Any]) -> nn.Module:
    options: dict[str, Any] = {"engine": engine, "engine_config": config, "memory_limit": 32 * MIB}
    if case == "prebuilt":
        return zerostart.load(path, model=matrix(SIDE), progress=False, **options)
    if case == "inside-zero.Init":
        import deepspeed

        whole = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": dist.get_world_size(), **config}
        with deepspeed.zero.Init(config_dict_or_path=whole):
            return zerostart.load(path, model=lambda: matrix(SIDE), progress=False, **options)
    return zerostart.load(path, model=lambda: matrix(SIDE), progress=False, **options)


@contextmanager
def memory_cap(nbytes: int) -> Iterator[None]:
    """Let the body allocate at most ``nbytes`` of private memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, before[1]))
    try:
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.empty(nbytes + MIB, dtype=torch.uint8)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def gathered_twice(model: nn.Module, engine: str) -> Iterator[torch.Tensor]:
    """Yield the parameter gathered by the engine, and again after it was repartitioned."""
    (parameter,) = model.parameters()
    for _ in range(2):
        if engine == "fsdp2":
            yield parameter.full_tensor().detach()  # type: ignore[operator]  # a DTensor
            continue
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach()


def equals_file(whole: torch.Tensor) -> bool:
    flat = whole.reshape(-1).view(torch.int32).numpy()
    for start in range(0, NUMEL, PIECE):
        piece = flat[start : start + PIECE]
        if not np.array_equal(piece, elements(start, len(piece)).view(np.int32)):
            return False
    return whole.shape == (SIDE, SIDE)
