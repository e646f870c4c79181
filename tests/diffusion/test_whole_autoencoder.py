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


class TinyVAE(nn.Module):
    """Encodes a clip chunk by chunk by its parts, as DiffSynth's do; its own forward is never called."""

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
    def __init__(self, vae: nn.Module, dit: nn.Module) -> None:
        super().__init__()
        self.vae, self.dit = vae, dit

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            encoded = self.vae.encode(clip)  # type: ignore[operator]
        return self.dit(encoded)


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
        mean = sum(both(clip(rank, step)) for rank in range(2)) / 2
        losses.append(float(mean))
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: tensor.detach().clone() for name, tensor in both.dit.state_dict().items()}


def train(source: str) -> tuple[list[float], dict[str, Any], bool]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    dit = zerostart.load(source, Dit, engine="deepspeed", engine_config=config, progress=False)
    setup = EngineSetup.asked("deepspeed", 3, config)
    arguments = {"model_class": TinyVAE, "module_map": None, "quantize": None}
    vae = DiffSynthLoad(Request(), setup, arguments, lambda *_: None).load_model(TinyVAE)
    vae.requires_grad_(False)
    both = Both(vae, dit)
    optimizer = torch.optim.AdamW([p for p in both.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=both, optimizer=optimizer, config=config)
    losses = []
    for step in range(6):
        loss = engine(clip(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        losses.append(float(mean))
    whole = all(tensor.numel() for tensor in vae.state_dict().values())
    return losses, dict(zerostart.full_tensors(dit)), whole


def test_ranks_call_it_unequally_often(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Dit()
    save_file(model.state_dict(), tmp_path / "dit.safetensors")
    expected, weights = alone(model.state_dict())
    for losses, found, whole in run_ranks(train, 2, str(tmp_path / "dit.safetensors"), timeout=120):
        assert whole
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, weights[name], msg=name)
