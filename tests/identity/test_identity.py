"""Sharded loads equal transformers' unsharded loads."""

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zerostart
from tests.identity.snapshots import Snapshot, differences, pretrained
from tests.quantised import DEEPSEEK, QUANTISED, deepseek_v3_fp8
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


@dataclass(frozen=True)
class Case:
    """One checkpoint, and how to load it."""

    kind: str
    stored: torch.dtype
    dtype: torch.dtype | None = None
    sharded: bool = False
    chunk_size: int | None = None


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
    **{name: Case(name, BF16) for name in QUANTISED},
    **{f"{name}-to-f32": Case(name, BF16, F32, chunk_size=1 << 16) for name in QUANTISED},
}
ENGINES = {"ZeRO-3": ("deepspeed", 3), "ZeRO-2": ("deepspeed", 2), "FSDP2": ("fsdp2", 3)}
#: Cases of the fast suite, with two ranks.
FAST = {"minilm", "qwen3-tied", "qwen3_moe-bf16-sharded", "gpt_oss-to-bf16", *QUANTISED}
RUNS = [
    pytest.param(size, case, marks=[] if size == 2 and case in FAST else pytest.mark.slow)
    for size in (2, 1, 3)
    for case in CASES
]


@dataclass(frozen=True)
class Task:
    """A picklable case: paths instead of tensors."""

    name: str
    path: Path
    dtype: torch.dtype | None
    chunk_size: int | None
    reference: Path


@pytest.fixture(scope="module")
def tasks(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("references")
    tasks_of_cases = []
    quantised = {name: make(folder / f"{name}-stored") for name, make in QUANTISED.items()}
    for name, case in CASES.items():
        path = quantised.get(case.kind) or checkpoints(case.kind, case.stored, sharded=case.sharded)
        reference = folder / f"{name}.pt"
        snapshot = Snapshot.of(pretrained(path, case.dtype))
        if case.kind in QUANTISED and case.dtype is not None:
            # transformers leaves unquantised tensors in their stored dtype.
            snapshot.state = {n: tensor.to(case.dtype) for n, tensor in snapshot.state.items()}
        torch.save(snapshot, reference)
        tasks_of_cases.append(Task(name, path, case.dtype, case.chunk_size, reference))
    return tasks_of_cases


Differences = list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def differences_by_run() -> dict[tuple[str, int, bool], Differences]:
    """Cached differences by engine, world size and suite."""
    return {}


@pytest.mark.parametrize(("world_size", "case"), RUNS)
@pytest.mark.parametrize("engine", ENGINES)
def test_identical_to_the_unsharded_load(
    engine: str,
    world_size: int,
    case: str,
    tasks: list[Task],
    differences_by_run: dict[tuple[str, int, bool], Differences],
) -> None:
    key = engine, world_size, case in FAST
    if key not in differences_by_run:
        selected = [task for task in tasks if (task.name in FAST) == key[2]]
        differences_by_run[key] = run_ranks(compare_all, world_size, engine, selected)
    for rank, by_case in enumerate(differences_by_run[key]):
        assert not by_case[case], f"rank {rank}:\n" + "\n".join(by_case[case])


def test_references_have_their_special_properties(tasks: list[Task]) -> None:
    references = {task.name: torch.load(task.reference, weights_only=False) for task in tasks}
    assert references["qwen3-tied"].ties == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert references["minilm"].unsaved.keys() >= {"embeddings.position_ids"}
    assert any("inv_freq" in name for name in references["gpt_oss-bf16-sharded"].unsaved)
    experts = references["mixtral-sharded"].state["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.shape == (3, 26, 20)
    assert references["minilm-to-bf16"].state["embeddings.word_embeddings.weight"].dtype == BF16
    assert not any(references["minilm"].training.values())


def compare_all(engine: str, tasks: list[Task]) -> dict[str, list[str]]:
    """Load every case; list differences or a traceback."""
    lines: dict[str, list[str]] = {}
    name, stage = ENGINES[engine]
    for task in tasks:
        reference = torch.load(task.reference, weights_only=False)
        options: dict[str, Any] = {"engine": name, "zero_stage": stage, "progress": False}
        try:
            model = zerostart.load(task.path, dtype=task.dtype, chunk_size=task.chunk_size, **options)
            lines[task.name] = differences(model, reference, name, stage)
            stored = sum(file.stat().st_size for file in task.path.glob("*.safetensors"))
            if (read := zerostart.report(model).read_bytes) > 1.3 * stored:
                lines[task.name].append(f"{read} bytes read of {stored}")
        except Exception:
            lines[task.name] = [traceback.format_exc()]
        failed = [None] * dist.get_world_size()
        dist.all_gather_object(failed, bool(lines[task.name]))
    return lines


def test_partial_blocks_at_the_edge_of_a_weight(tmp_path: Path) -> None:
    """Transformers refuses such blocks of DeepSeek-V3."""
    path = deepseek_v3_fp8(tmp_path / "partial", (32, 32), DEEPSEEK)
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    model = zerostart.load(path, engine="fsdp2", dtype=torch.float32, progress=False)
    loaded = dict(zerostart.full_tensors(model))
    checked = 0
    for name, scales in stored.items():
        plain = name.removesuffix("_scale_inv")
        if name.endswith("_scale_inv") and plain in loaded:
            weight = stored[plain]
            block_scales = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
            expected = weight.float() * block_scales[: weight.shape[0], : weight.shape[1]]
            assert torch.equal(loaded[plain], expected), plain
            checked += any(size % 32 for size in weight.shape)
    assert checked > 10


def test_unsupported_quantisation_is_refused(tmp_path: Path) -> None:
    path = QUANTISED["gpt_oss-mxfp4"](tmp_path / "awq")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zerostart.ZerostartError, match="awq"):
        zerostart.load(path, engine="fsdp2", progress=False)


@pytest.mark.parametrize("name", QUANTISED)
def test_save_of_a_dequantised_load_is_plain(name: str, tmp_path: Path) -> None:
    """Names are those of plain weights, not mxfp4's ``..._blocks``."""
    path = QUANTISED[name](tmp_path / "quantised")
    model = zerostart.load(path, engine="fsdp2", dtype=BF16, progress=False)
    zerostart.save(model, tmp_path / "saved")
    expected, saved = pretrained(path, BF16).state_dict(), pretrained(tmp_path / "saved", BF16).state_dict()
    assert expected.keys() == saved.keys()
    assert not [n for n, tensor in expected.items() if not torch.equal(saved[n], tensor.to(saved[n].dtype))]
