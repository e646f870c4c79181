"""DiffSynth's frozen autoencoder at ZeRO-3: unsharded, and called unequally often on each rank."""

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
    """Encode a clip chunk by chunk, as DiffSynth's autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))  # DeepSpeed cannot partition it

    def encode(self, chunks: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.encoder(chunk) for chunk in chunks]).mean(0) * self.scale


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return hidden.square().mean()


class Pipeline(nn.Module):
    def __init__(self, vae: Any, dit: nn.Module) -> None:
        super().__init__()
        self.vae, self.dit = vae, dit

    def forward(self, chunks: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            encoded = self.vae.encode(chunks)
        loss: torch.Tensor = self.dit(encoded)
        return loss


def make_clip(rank: int, step: int) -> torch.Tensor:
    """Return one to three chunks, so that the trace of no step fits another."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn((1 + (rank * (step + 1) + step // 2) % 3, 2, WIDTH), generator=generator)


def train_in_one_process(weights: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipeline = Pipeline(TinyVAE(), Dit())
    pipeline.dit.load_state_dict(weights)
    optimizer = torch.optim.AdamW(pipeline.dit.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        mean = torch.stack([pipeline(make_clip(rank, step)) for rank in range(2)]).mean()
        losses.append(float(mean.detach()))
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"dit.{name}": tensor.clone() for name, tensor in pipeline.dit.state_dict().items()}


def load_pipeline(source: str) -> Pipeline:
    dit = zerostart.load(source, Dit, engine="deepspeed", engine_config=CONFIG, progress=False)
    arguments = {"model_class": TinyVAE, "module_map": None, "quantize": None}
    call = DiffSynthLoad(Request(), EngineSetup.requested("deepspeed", 3, CONFIG), arguments, lambda *_: None)
    return Pipeline(call.load_model(TinyVAE).requires_grad_(False), dit)


def train(source: str) -> tuple[list[float], dict[str, Any], bool]:
    import deepspeed

    pipeline = load_pipeline(source)
    optimizer = torch.optim.AdamW([p for p in pipeline.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=CONFIG)
    losses = []
    for step in range(6):
        loss = engine(make_clip(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        losses.append(float(mean))
    state, expected = pipeline.vae.state_dict(), TinyVAE().state_dict()
    is_unsharded = state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in expected
    )
    return losses, dict(zerostart.full_tensors(pipeline, rank=None)), is_unsharded


def encode(source: str) -> torch.Tensor:
    """Encode with nothing trained, as the task ``sft:data_process`` does."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=load_pipeline(source).requires_grad_(False), config=CONFIG)
    with torch.no_grad():
        result: torch.Tensor = engine(torch.ones(dist.get_rank() + 1, 3, WIDTH))
    return result


def test_ranks_may_encode_unequally_often(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, source = Dit(), str(tmp_path / "dit.safetensors")
    save_file(model.state_dict(), source)
    expected, weights = train_in_one_process(model.state_dict())
    for losses, state, is_unsharded in run_ranks(train, 2, source, timeout=120):
        assert is_unsharded
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, msg=name)
    with torch.no_grad():
        encoding = Pipeline(TinyVAE(), model)(torch.ones(1, 3, WIDTH))
    for encoded in run_ranks(encode, 2, source, timeout=120):
        torch.testing.assert_close(encoded, encoding)
