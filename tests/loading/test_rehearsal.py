"""One rank played alone does what that rank does among the others: same bytes read, same shard filled."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.cli import main
from zerostart.errors import ConfigError
from zerostart.live.model import record_of
from zerostart.loading.request import Request
from zerostart.loading.run import rehearse


def loaded(path: Path, options: dict[str, object]) -> tuple[int, dict[str, torch.Tensor]]:
    model = zerostart.load(path, progress=False, **options)  # type: ignore[arg-type]
    made = zerostart.report(model)
    shards = record_of(model).shards(model)
    return made.read_bytes, {
        name: shard.storage.reshape(-1)[: shard.layout.owned].clone() for name, shard in shards.items()
    }


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("qwen3_moe", 3, {"engine": "deepspeed"}),
        ("qwen3_moe", 3, {"engine": "fsdp2"}),
        ("gpt_oss", 2, {"engine": "fsdp2", "dtype": torch.bfloat16}),
    ],
)
def test_a_rank_played_alone(
    kind: str, world: int, options: dict[str, object], checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints(kind, torch.float32)
    same(path, world, options)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_a_rank_with_experts_played_alone(engine: str, tmp_path: Path) -> None:
    same(checkpoint("qwen3_moe", tmp_path), 2, {"engine": engine, "expert_parallel": 2})


def same(path: Path, world: int, options: dict[str, object]) -> None:
    for rank, (read_bytes, shards) in enumerate(run_ranks(loaded, world, path, options)):
        made, played = rehearse(Request(path, **options), world, rank)  # type: ignore[arg-type]
        assert made.read_bytes == made.planned_bytes == read_bytes
        assert (made.rank, made.world_size) == (rank, world)
        assert {shard.name for shard in played} <= shards.keys()
        for shard in played:
            assert torch.equal(shard.storage[: shard.layout.owned], shards[shard.name]), shard.name


@pytest.mark.parametrize(
    ("engine", "stage"), [("deepspeed", 2), ("deepspeed", 1), ("fsdp2", 0), ("fsdp2", 1)]
)
@pytest.mark.parametrize("exchange", [None, True])
def test_a_rank_of_other_stages_played_alone(
    engine: str, stage: int, exchange: bool | None, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("qwen3_moe", torch.float32)
    options: dict[str, object] = {"engine": engine, "zero_stage": stage}
    if stage == 1 and engine == "fsdp2":
        same(path, 3, options)
        return
    options["exchange"] = exchange
    parts: dict[str, list[torch.Tensor]] = {}
    outcomes = run_ranks(loaded_whole, 3, path, options)
    for rank, (read_bytes, parameters) in enumerate(outcomes):
        made, played = rehearse(Request(path, **options), 3, rank)  # type: ignore[arg-type]
        assert made.read_bytes == made.planned_bytes == read_bytes
        assert made.tier is not None
        assert {shard.name for shard in played} == parameters.keys()
        # The whole buffer is there, whatever is read of it.
        assert len({shard.storage.untyped_storage().data_ptr() for shard in played}) == 1
        for shard in played:
            parts.setdefault(shard.name, []).append(shard.storage.clone())
    for name, parameter in outcomes[0][1].items():
        flat = parameter.reshape(-1)
        if exchange:
            assert torch.equal(torch.cat(parts[name]), flat), name
        else:
            assert all(torch.equal(part, flat) for part in parts[name]), name


def loaded_whole(path: Path, options: dict[str, object]) -> tuple[int, dict[str, torch.Tensor]]:
    model = zerostart.load(path, progress=False, **options)  # type: ignore[arg-type]
    return zerostart.report(model).read_bytes, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("exchange", [None, True])
def test_experts_at_stage_2_planned_and_played_alone(exchange: bool | None, tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe", tmp_path)
    options: dict[str, Any] = {"zero_stage": 2, "expert_parallel": 2, "exchange": exchange}
    plan = zerostart.plan(path, world_size=4, engine="deepspeed", **options)
    parts: dict[str, list[torch.Tensor]] = {}
    outcomes = run_ranks(loaded_whole, 4, path, {"engine": "deepspeed", **options})
    for rank, (read_bytes, parameters) in enumerate(outcomes):
        assert plan.ranks[rank].read_bytes == read_bytes
        made, played = rehearse(Request(path, **options), 4, rank)
        assert made.read_bytes == made.planned_bytes == read_bytes
        assert made.tier is not None
        assert plan.tier is not None
        assert made.tier.buffer_bytes == plan.tier.buffer_bytes <= plan.ranks[rank].device_bytes
        assert {shard.name for shard in played} == parameters.keys()
        for shard in played:
            if ".experts." in shard.name or not exchange:
                assert torch.equal(shard.storage, parameters[shard.name].reshape(-1)), shard.name
            else:
                parts.setdefault(shard.name, []).append(shard.storage.clone())
    for name, part in parts.items():
        assert torch.equal(torch.cat(part), outcomes[0][1][name].reshape(-1)), name


def test_a_rank_that_is_not_there(checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(ConfigError, match="rank=4 is not one of the 4 ranks"):
        rehearse(Request(checkpoints("qwen3", torch.float32)), 4, 4)


@pytest.mark.parametrize(
    "arguments",
    [["--rank", "1"], ["--world-size", "2"], [], ["--nproc", "2", "--rank", "1", "--world-size", "2"]],
)
def test_who_loads_is_said_once(arguments: list[str], checkpoints: TinyCheckpoints) -> None:
    path = str(checkpoints("qwen3", torch.float32))
    with pytest.raises(SystemExit) as left:
        main(["load", path, *arguments])
    assert left.value.code == 2


@pytest.mark.slow
def test_the_command_plays_a_rank(checkpoints: TinyCheckpoints, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(checkpoints("qwen3", torch.float32))
    with pytest.raises(SystemExit) as left:
        main(["load", path, "--world-size", "4", "--rank", "3"])
    assert not left.value.code
    assert "rank 3 of 4" in capsys.readouterr().out
