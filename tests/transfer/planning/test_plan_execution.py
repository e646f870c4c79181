"""Plans on real files, compared with the same conversion in eager torch."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from zerostart.checkpoint.source import open_catalog
from zerostart.geometry.layout import flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer.planning import Destination, join


def test_what_is_stored_in_one_run_is_read_into_place_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(64, dtype=torch.float32) + i for i in range(4)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    catalog = open_catalog(path)
    expected = []
    for name, tensor in tensors.items():
        symbolic = SymbolicTensor.of(name, tensor.shape, tensor.dtype)
        layout = flat_partition(tensor.shape, 0, 1)
        recipe = Recipe(Target(name, (64,), tensor.dtype), symbolic.pieces)
        expected.append((recipe, layout, Destination(name, 64, 64, tensor.dtype, direct=True)))
    plan = join(catalog, expected)
    assert len(plan.reads) == 1
    assert plan.reads[0].direct
    assert plan.read_bytes == 4 * 64 * 4


def test_half_of_the_columns_costs_half_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(512 * 2048, dtype=torch.float32).view(512, 2048)}, path)
    symbolic = SymbolicTensor.of("w", (512, 2048), torch.float32)[:, 512:1536]
    layout = flat_partition((512, 1024), 1, 2)
    destination = Destination("w", layout.numel, layout.owned, torch.float32, direct=True)
    plan = join(
        open_catalog(path),
        [(Recipe(Target("w", (512, 1024), torch.float32), symbolic.pieces), layout, destination)],
    )
    assert plan.read_bytes == 256 * 1024 * 4
