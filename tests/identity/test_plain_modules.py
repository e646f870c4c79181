"""A module that knows nothing of transformers, from a callable, from the meta device, or from a class."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostart
from tests.identity.snapshots import Snapshot, differences
from tests.ranks import run_ranks

VOCABULARY, WIDTH = 29, 7


class Rotation(nn.Module):
    """Holds every kind of tensor that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(WIDTH, dtype=torch.float32).mul(0.37).add(0.1)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("steps", torch.tensor(3), persistent=True)
        self.sines = angles.sin()  # a plain attribute: no state dict knows it
        self.tables = {"squares": [angles**2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cosines + x.flip(-1) * self.sines


class Tagger(nn.Module):
    """An embedding tied to the output layer, a frozen layer, a scalar, and `Rotation`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rotation = Rotation()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.rotation(self.embedding(tokens))
        return self.output(self.norm(self.dropout(self.frozen(x)).transpose(1, 2)).transpose(1, 2))


def from_callable() -> nn.Module:
    return Tagger(WIDTH)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tagger()


SOURCES: dict[str, Callable[[], object]] = {
    "callable": lambda: from_callable,
    "class": lambda: Tagger,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint file of a Tagger with values of its own, and the snapshot of that Tagger."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = Tagger()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(11))
    folder = tmp_path_factory.mktemp("plain")
    tensors = model.state_dict()
    del tensors["output.weight"]  # A tied tensor is stored once.
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    torch.save(Snapshot.of(model.eval()), folder / "reference.pt")  # as a load leaves it
    return folder / "model.safetensors", folder / "reference.pt"


@pytest.mark.slow
@pytest.mark.parametrize("how", SOURCES)
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_plain_module(engine: str, how: str, trained: tuple[Path, Path]) -> None:
    for world_size in (1, 2, 3):
        for lines in run_ranks(load_plain, world_size, engine, how, *trained):
            assert not lines, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_module_on_meta_with_tensors_that_nothing_can_restore_is_refused(
    engine: str, trained: tuple[Path, Path]
) -> None:
    """Built on meta by its author, the module's computed tensors are lost: better an error than garbage."""
    for message in run_ranks(load_from_meta, 2, engine, trained[0]):
        assert "cosines" in message
        assert "sines" in message


def load_plain(engine: str, how: str, file: Path, reference: Path) -> list[str]:
    model = zerostart.load(file, SOURCES[how](), engine=engine, progress=False)
    return differences(model, torch.load(reference, weights_only=False), engine)


def load_from_meta(engine: str, file: Path) -> str:
    with pytest.raises(zerostart.ZerostartError) as raised:
        zerostart.load(file, on_meta(), engine=engine, progress=False)
    return str(raised.value)
