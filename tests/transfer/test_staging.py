"""Device staging on the CPU: buffers in turn, casts, permutations, leftovers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.source import open_catalog
from zerostart.geometry.layout import dimension_shard
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer import FileReader, Rows
from zerostart.transfer.execute import Crew
from zerostart.transfer.planning import Destination, Part, PlanOptions, join
from zerostart.transfer.staging import DeviceStaging


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_plan_through_device_staging(tmp_path: Path, depth: int, dtype: torch.dtype, dim: int) -> None:
    stored = {name: torch.randn(90, 400) for name in "abc"} | {"odd": torch.arange(7, dtype=torch.uint8)}
    path = tmp_path / "model.safetensors"
    save_file(stored, path)
    symbols = {n: SymbolicTensor.of(n, tuple(t.shape), t.dtype) for n, t in stored.items()}
    turned = {"a": (symbols["a"], stored["a"]), "b": (symbols["b"].t(), stored["b"].t())}
    turned["odd"] = (symbols["odd"], stored["odd"])
    wanted, storages, expected = [], [], []
    for name, (symbolic, real) in turned.items():
        kind = dtype if real.is_floating_point() else real.dtype
        layout = dimension_shard(tuple(real.shape), dim if real.dim() > 1 else 0, 1, 2)
        recipe = Recipe(Target(name, tuple(real.shape), kind), symbolic.pieces)
        wanted.append((recipe, layout, Destination(name, layout.numel, layout.owned, kind, direct=False)))
        storages.append(torch.zeros(layout.numel, dtype=kind))
        expected.append(real.chunk(2, dim if real.dim() > 1 else 0)[1].to(kind).reshape(-1))
    plan = join(open_catalog(path), wanted, PlanOptions(chunk_size=20_000))
    with (
        FileReader(plan.storage.files, plan.storage.sizes) as reader,
        DeviceStaging(plan.chunk_size, depth, torch.device("cpu")) as staging,
    ):
        for read in plan.reads:
            view = staging.view(read.nbytes)
            rows = Rows(read.rows, read.nbytes // read.rows, read.stride)
            if read.rows == 1:
                reader.read(read.file, read.offset, [view])
            else:
                reader.gather(read.file, read.offset, rows, view, rows.width)
            staging.deliver(read.parts, storages)
    assert len(plan.reads) > 3
    for storage, want in zip(storages, expected, strict=True):
        assert torch.equal(storage[: want.numel()], want)


def test_result_larger_than_the_buffers() -> None:
    data = torch.randn(100)
    storage = torch.zeros(120, dtype=torch.bfloat16)
    part = Part(0, torch.float32, 0, 20, ((100, 1, 1),), direct=False)
    with DeviceStaging(64, 2, torch.device("cpu")) as staging:
        staging.copy_part(part, data.view(torch.uint8), storage)
    assert torch.equal(storage[20:], data.bfloat16())


def test_threads_write_to_what_their_caller_made_in_inference_mode() -> None:
    with torch.inference_mode():
        storage, all_there = torch.zeros(3), threading.Barrier(3)

        def work(places: Iterator[int]) -> None:
            for place in places:
                all_there.wait(30)
                storage[place].fill_(place + 1)

        Crew(range(3), work, None, "test").run(3)
        assert storage.tolist() == [1, 2, 3]
