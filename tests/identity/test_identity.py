"""A sharded load, gathered, equals transformers' own unsharded load of the same files, bit for bit."""

import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.snapshots import Snapshot, differences, pretrained
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


@dataclass(frozen=True)
class Case:
    """One checkpoint: its kind, the dtype that it stores, the dtype asked for, one file or many."""

    kind: str
    stored: torch.dtype
    dtype: torch.dtype | None = None
    sharded: bool = False


F32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "minilm": Case("minilm", F32),
    "minilm-to-bf16": Case("minilm", F32, BF16),
    "qwen3-tied": Case("qwen3", F32),
    "qwen3-tied-bf16-sharded": Case("qwen3", BF16, sharded=True),
    "qwen3_moe-bf16-sharded": Case("qwen3_moe", BF16, sharded=True),
    "qwen3_moe-to-bf16": Case("qwen3_moe", F32, BF16),
    "mixtral-bf16": Case("mixtral", BF16),
    "mixtral-sharded": Case("mixtral", F32, sharded=True),
    "mixtral-to-f32": Case("mixtral", BF16, F32),
    "gpt_oss-bf16-sharded": Case("gpt_oss", BF16, sharded=True),
    "gpt_oss-to-bf16": Case("gpt_oss", F32, BF16),
}
ENGINES = ("deepspeed", "fsdp2")
WORLD_SIZES = (1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4)))


@dataclass(frozen=True)
class Task:
    """What a rank needs of a case: plain paths, for tensors would have to be pickled."""

    name: str
    path: Path
    dtype: torch.dtype | None
    reference: Path


@pytest.fixture(scope="module")
def tasks(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("references")
    made = []
    for name, case in CASES.items():
        path = checkpoints(case.kind, case.stored, sharded=case.sharded)
        reference = folder / f"{name}.pt"
        torch.save(Snapshot.of(pretrained(path, case.dtype)), reference)
        made.append(Task(name, path, case.dtype, reference))
    return made


@pytest.fixture(scope="module")
def found(tasks: list[Task]) -> dict[tuple[str, int], list[dict[str, list[str]]]]:
    """Differences by engine and world size, filled on first use: one group of ranks does all cases."""
    return {}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("engine", ENGINES)
def test_identical_to_the_unsharded_load(
    engine: str,
    world_size: int,
    case: str,
    tasks: list[Task],
    found: dict[tuple[str, int], list[dict[str, list[str]]]],
) -> None:
    if (engine, world_size) not in found:
        found[engine, world_size] = run_ranks(compare_all, world_size, engine, tasks)
    for rank, lines in enumerate(found[engine, world_size]):
        assert not lines[case], f"rank {rank}:\n" + "\n".join(lines[case])


def test_the_reference_has_what_it_should(tasks: list[Task]) -> None:
    """The cases exercise what they are for; otherwise an empty comparison would pass."""
    references = {task.name: torch.load(task.reference, weights_only=False) for task in tasks}
    assert references["qwen3-tied"].ties == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert references["minilm"].unsaved.keys() >= {"embeddings.position_ids"}
    assert any("inv_freq" in name for name in references["gpt_oss-bf16-sharded"].unsaved)
    experts = references["mixtral-sharded"].state["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.shape == (3, 26, 20)
    assert references["minilm-to-bf16"].state["embeddings.word_embeddings.weight"].dtype == BF16
    assert not any(references["minilm"].training.values())


def compare_all(engine: str, tasks: list[Task]) -> dict[str, list[str]]:
    """On a rank: load every case and list its differences, or how it failed."""
    lines: dict[str, list[str]] = {}
    for task in tasks:
        reference = torch.load(task.reference, weights_only=False)
        try:
            model = zerostart.load(task.path, engine=engine, dtype=task.dtype, progress=False)
            lines[task.name] = differences(model, reference, engine)
        except Exception:
            lines[task.name] = [traceback.format_exc()]
        failed = [None] * dist.get_world_size()
        dist.all_gather_object(failed, bool(lines[task.name]))
    return lines
