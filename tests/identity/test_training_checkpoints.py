"""Load training checkpoints like the tools that wrote them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.foreign_checkpoints import build_model, write_dcp, write_deepspeed
from tests.ranks import rank_outcomes, run_ranks
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError


def load_whole(source: str, engine: str, stage: int) -> dict[str, torch.Tensor] | None:
    """Load with zerostart; return whole tensors on rank 0."""
    import zerostart

    model = zerostart.load(source, model=_build_on_meta, engine=engine, zero_stage=stage, dtype=torch.float32)
    tensors = dict(zerostart.full_tensors(model))
    return tensors if dist.get_rank() == 0 else None  # type: ignore[return-value]


def _build_on_meta() -> Any:
    with torch.device("meta"):
        return build_model()


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(actual) >= set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(actual[name].dtype)), name


@pytest.mark.parametrize(
    ("stage", "bf16", "frozen", "world"),
    [
        pytest.param(1, True, False, 2, marks=pytest.mark.slow),
        pytest.param(2, True, True, 3, marks=pytest.mark.slow),
        (3, True, True, 2),
        pytest.param(3, False, False, 3, marks=pytest.mark.slow),
        pytest.param(2, False, False, 2, marks=pytest.mark.slow),
        pytest.param(1, False, True, 4, marks=pytest.mark.slow),
    ],
)
def test_zero_checkpoint_equals_zero_to_fp32(
    tmp_path: Path, stage: int, bf16: bool, frozen: bool, world: int
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    out = str(tmp_path / "run")
    run_ranks(write_deepspeed, world, out, stage, bf16, frozen)
    expected = get_fp32_state_dict_from_zero_checkpoint(out, lazy_mode=False)
    if stage == 1 and frozen:  # zero_to_fp32 omits them
        states = torch.load(Path(out) / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
        expected |= {name: tensor.float() for name, tensor in states["module"].items() if "mlp" in name}
    engine = "deepspeed" if stage == 3 else "fsdp2"
    assert_equal(run_ranks(load_whole, 2, out, engine, 3)[0], expected)


@pytest.mark.slow
def test_rank_reads_only_its_part_of_a_zero_checkpoint(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run_ranks(write_deepspeed, 2, out, 3, True, False)
    catalog = open_catalog(out)
    assert catalog.assembled is not None
    stored = {name: entry.nbytes for name, entry in catalog.tensors.items()}
    # Optimizer states, with twice the bytes, are not read.
    assert sum(stored.values()) < 1.1 * sum(
        tensor.nbytes for name, tensor in catalog.assembled.items() if name != "lm_head.weight"
    )
    read = [report["read_bytes"] for report in run_ranks(_measure_read, 2, out)]
    assert max(read) < 0.75 * sum(stored.values())


def _measure_read(source: str) -> dict[str, int]:
    import zerostart

    model = zerostart.load(source, model=_build_on_meta, engine="fsdp2", dtype=torch.float32, exchange=False)
    return {"read_bytes": zerostart.report(model).read_bytes}


@pytest.mark.parametrize(("wrapped", "world"), [(True, 3), pytest.param(False, 2, marks=pytest.mark.slow)])
def test_torch_distributed_checkpoint_is_loaded(tmp_path: Path, wrapped: bool, world: int) -> None:
    out = str(tmp_path / "dcp")
    expected = run_ranks(write_dcp, world, out, wrapped)[0]
    assert_equal(run_ranks(load_whole, 2, out, "deepspeed", 3)[0], expected)


@pytest.mark.slow
def test_folders_of_accelerate_are_found(tmp_path: Path) -> None:
    expected = run_ranks(write_dcp, 2, str(tmp_path / "a" / "pytorch_model_fsdp_0"), False)[0]
    assert_equal(run_ranks(load_whole, 1, str(tmp_path / "a"), "fsdp2", 3)[0], expected)
    run_ranks(write_deepspeed, 2, str(tmp_path / "b" / "pytorch_model"), 2, True, False)
    assert open_catalog(tmp_path / "b").root == str(tmp_path / "b" / "pytorch_model")


@pytest.mark.slow
def test_missing_file_is_one_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_ranks(write_deepspeed, 3, str(out), 3, True, False)
    tag = out / (out / "latest").read_text()
    last = next(tag.glob("*zero_pp_rank_2_*_optim_states.pt"))
    last.unlink()
    outcomes = rank_outcomes(load_whole, 2, str(out), "fsdp2", 3)
    assert {o.error.rpartition(".")[2] for o in outcomes} == {"CheckpointError"}
    assert len({o.message for o in outcomes}) == 1
    assert "3 ranks" in outcomes[0].message
    next(tag.glob("*zero_pp_rank_1_*_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="3 ranks"):
        open_catalog(out)


class _Code:
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return exec, ("import pathlib; pathlib.Path('was_run').touch()",)


def test_no_code_in_a_training_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    run_ranks(write_deepspeed, 1, str(out), 2, False, False)
    states = next((out / (out / "latest").read_text()).glob("mp_rank_00_model_states.pt"))
    value = torch.load(states, weights_only=False)
    value["client"] = _Code()
    torch.save(value, states)
    open_catalog(out)
    assert not (tmp_path / "was_run").exists()
