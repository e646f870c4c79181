"""Ranks that call the sharded models of a pipeline each as it likes, and what who waits for ever is told."""

import datetime
import time
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.integrations.pipelines.tiny_pipelines import CALLS, make_pipeline
from tests.ranks import rank_outcomes, run_ranks
from zerostart.errors import ConfigError, EngineError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline("wan", tmp_path_factory.mktemp("synced") / "wan")


def made(pipe: Any, rank: int) -> list[torch.Tensor]:
    """Rank 0 makes a longer video than rank 1, of another prompt, without guidance; each draws noise."""
    pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(rank)
    ways: list[dict[str, Any]] = [
        {"num_inference_steps": 3, "output_type": "pt", "num_frames": 9, "guidance_scale": 1.0},
        {"num_inference_steps": 1, "output_type": "latent"},
    ]
    prompt = ("a cat sees the sea and sleeps", "the sea")[rank]
    found = [pipe(prompt, **{**CALLS["wan"], **ways[rank]})[0]]
    if rank == 1:  # what the first rank does not call by itself
        with torch.no_grad():
            tokens = torch.tensor([[4, 5, 6]])
            found += [pipe.text_encoder.encoder(tokens).last_hidden_state, torch.rand(2)]
            with torch.autocast("cpu", torch.bfloat16):  # which the other rank is not in, and this needs
                latents = torch.rand(1, 4, 2, 4, 4).bfloat16()
                found += [pipe.transformer(latents, torch.tensor([500.0]), torch.rand(1, 3, 16))[0]]
    return [torch.as_tensor(one) for one in found]


def each_its_own(path: Path, engine: str) -> list[bool]:
    """Whether this rank has what it has alone, and whether methods are the models' own afterwards."""
    rank = dist.get_rank()
    pipe = zerostart.load_pipeline(path, engine=engine, progress=False)
    before = pipe.vae.decode
    with zerostart.synced(pipe):
        found = made(pipe, rank)
    expected = made(diffusers.DiffusionPipeline.from_pretrained(str(path)), rank)
    assert pipe.vae.decode == before
    with (
        pytest.raises(EngineError, match="transformer has an argument or a weight that needs a gradient"),
        zerostart.synced(pipe),
    ):
        pipe.transformer(torch.ones(1, 4, 1, 2, 2, requires_grad=True), None, None)
    with pytest.raises(zerostart.ZerostartError, match="rank 1: ValueError: invalid"), zerostart.synced(pipe):
        pipe.text_encoder(torch.tensor([[int("45x"[: 2 + rank])]]))
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_each_rank_makes_what_it_makes_alone(engine: str, path: Path) -> None:
    for same in run_ranks(each_its_own, 2, path, engine):
        assert all(same), same


def alone_in_the_encoder(path: Path, engine: str) -> None:
    pipe = zerostart.load_pipeline(path, engine=engine, without=("transformer", "vae"), progress=False)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    if dist.get_rank() == 0:
        with torch.no_grad():
            pipe.text_encoder(torch.tensor([[4, 5, 6]]))
    time.sleep(10)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_who_waits_for_ever_is_told_where_and_what_to_do(engine: str, path: Path) -> None:
    waiting = rank_outcomes(alone_in_the_encoder, 2, path, engine)[0].describe()
    assert "of the sharded component text_encoder, for which all ranks have to be there" in waiting
    assert "zerostart.synced(pipe)" in waiting


def test_nothing_in_shards_is_told() -> None:
    model = zerostart.load(
        nn.Linear(2, 2).state_dict(), model=lambda: nn.Linear(2, 2), engine="fsdp2", zero_stage=0
    )
    with pytest.raises(ConfigError, match="no model of this Linear is sharded"), zerostart.synced(model):
        pass
