"""Settings of DeepSpeed's beside experts and tensors that ranks share: trained as one process trains."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.tensors.layouts import Course, Layout, trained
from tests.parity import alone, checkpoint, differences
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

#: What shares a model, and the model: ranks that share experts, and tensors.
AXES = {"E": ("qwen3_moe", 2, 1), "T": ("qwen3", 1, 2), "E + T": ("qwen3_moe", 2, 2)}
HOST = {"device": "cpu", "pin_memory": False}
EXACT = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


#: Stages with ``zero_optimization`` and what else the configuration has.
SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "reduce_scatter: false": ((3, 1, 2), {"reduce_scatter": False}, {}),
    "contiguous_gradients: false": ((3, 1, 2), {"contiguous_gradients": False}, {}),
    "gradient_predivide_factor": ((1,), {}, {"gradient_predivide_factor": 3.0}),
    "the same, reduced whole": ((3, 1, 2), {"reduce_scatter": False}, {"gradient_predivide_factor": 3.0}),
    "states on the host": ((3, 1, 2), {"offload_optimizer": HOST}, {}),
    "all on the host": ((3,), {"offload_optimizer": HOST, "offload_param": HOST}, {}),
    "overlap_comm": ((3, 2), {"overlap_comm": True}, {}),
    "round_robin_gradients": ((1, 2), {"round_robin_gradients": True}, {}),
}
#: Refused at stages 1 and 2 where experts are shared.
UNREDUCED = ("reduce_scatter: false", "contiguous_gradients: false", "the same, reduced whole")


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_train_as_one_process(axes: str, setting: str, tmp_path: Path) -> None:
    kind, experts, tensors = AXES[axes]
    path = checkpoint(kind, tmp_path)
    stages, zero, config = SETTINGS[setting]
    if experts > 1 and setting in UNREDUCED:
        stages = (3,)
    check([(path, Layout(stage, experts, tensors, zero, config), None) for stage in stages], tmp_path)


@pytest.mark.parametrize("axes", AXES)
def test_states_on_nvme(axes: str, tmp_path: Path) -> None:
    """As on the host; of layers that are large enough for DeepSpeed to swap them."""
    kind, experts, tensors = AXES[axes]
    wide = {"moe_intermediate_size" if experts > 1 else "intermediate_size": 1024}
    path = checkpoint(kind, tmp_path, hidden_size=512, num_hidden_layers=1, **wide)
    place = tmp_path / "nvme"
    place.mkdir()
    nvme = {"device": "nvme", "nvme_path": str(place), "buffer_count": 8, "pin_memory": False}
    homes = [Layout(3, experts, tensors, {"offload_optimizer": home}) for home in (HOST, nvme)]
    for wanted, found in run_ranks(trained, 4, [(path, home, None) for home in homes], tmp_path, timeout=450):
        assert differences(found, wanted) == []
    assert any(place.rglob("*.swp"))


@pytest.mark.parametrize("axes", AXES)
def test_bf16_with_sums_in_fp32(axes: str, tmp_path: Path) -> None:
    """Losses and norms are those of one process in fp32 as near as bf16 is."""
    kind, experts, tensors = AXES[axes]
    path = checkpoint(kind, tmp_path)
    stages = (1, 2, 3) if experts == 1 else (2, 3)
    courses: list[Course] = [(path, Layout(stage, experts, tensors, {}, EXACT), None) for stage in stages]
    check(courses, tmp_path, 0.03)


def check(courses: list[Course], folder: Path, near: float | None = None) -> None:
    """Compare each course on 4 ranks with one process; ``near``: its losses and norms alone, to that."""
    wanted = run_ranks(alone, 1, courses[0][0])[0]
    results = run_ranks(trained, 4, courses, folder, timeout=450)
    for course, *traces in zip(courses, *results, strict=True):
        for trace in traces:
            if near is not None:
                trace.gradients, trace.weights = wanted.gradients, wanted.weights
            assert (course[1], differences(trace, wanted, near or 1e-5)) == (course[1], [])
