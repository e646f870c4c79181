"""DiffSynth's autoencoder at ZeRO-3: whole, frozen, and called another number of times on each rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.integrations.diffsynth import DiffSynthLoad
from zerostart.integrations.engine_setup import EngineSetup
from zerostart.loading.request import Request

WIDTH = 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


class TinyVAE(nn.Module):
    """Encodes a clip chunk by chunk by its parts, as DiffSynth's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))  # DeepSpeed cannot partition it

    def encode(self, clip: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.encoder(chunk) for chunk in clip]).mean(0) * self.scale


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return hidden.square().mean()


class Both(nn.Module):
    def __init__(self, vae: Any, dit: nn.Module) -> None:
        super().__init__()
        self.vae, self.dit = vae, dit

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            encoded = self.vae.encode(clip)
        loss: torch.Tensor = self.dit(encoded)
        return loss


def clip(rank: int, step: int) -> torch.Tensor:
    """One to three chunks, in another order on each rank: traces of the first step fit no later one."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn((1 + (rank * (step + 1) + step // 2) % 3, 2, WIDTH), generator=generator)


def alone(weights: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    both = Both(TinyVAE(), Dit())
    both.dit.load_state_dict(weights)
    optimizer = torch.optim.AdamW(both.dit.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        mean = torch.stack([both(clip(rank, step)) for rank in range(2)]).mean()
        losses.append(float(mean.detach()))
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"dit.{name}": tensor.clone() for name, tensor in both.dit.state_dict().items()}


def load_both(source: str) -> Both:
    dit = zerostart.load(source, Dit, engine="deepspeed", engine_config=CONFIG, progress=False)
    arguments = {"model_class": TinyVAE, "module_map": None, "quantize": None}
    call = DiffSynthLoad(Request(), EngineSetup.requested("deepspeed", 3, CONFIG), arguments, lambda *_: None)
    return Both(call.load_model(TinyVAE).requires_grad_(False), dit)


def train(source: str) -> tuple[list[float], dict[str, Any], bool]:
    import deepspeed

    both = load_both(source)
    optimizer = torch.optim.AdamW([p for p in both.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=both, optimizer=optimizer, config=CONFIG)
    losses = []
    for step in range(6):
        loss = engine(clip(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        losses.append(float(mean))
    found, values = both.vae.state_dict(), TinyVAE().state_dict()
    whole = found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)
    return losses, dict(zerostart.full_tensors(both, rank=None)), whole


def encode(source: str) -> torch.Tensor:
    """As ``sft:data_process`` runs it, with nothing that is trained."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=load_both(source).requires_grad_(False), config=CONFIG)
    with torch.no_grad():
        result: torch.Tensor = engine(torch.ones(dist.get_rank() + 1, 3, WIDTH))
    return result


def test_ranks_call_it_unequally_often(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, source = Dit(), str(tmp_path / "dit.safetensors")
    save_file(model.state_dict(), source)
    expected, weights = alone(model.state_dict())
    for losses, found, whole in run_ranks(train, 2, source, timeout=120):
        assert whole
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, msg=name)
    with torch.no_grad():
        wanted = Both(TinyVAE(), model)(torch.ones(1, 3, WIDTH))
    for encoded in run_ranks(encode, 2, source, timeout=120):
        torch.testing.assert_close(encoded, wanted)
