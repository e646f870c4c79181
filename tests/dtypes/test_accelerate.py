"""accelerate's FSDP2 preparation leaves loaded models unchanged."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerostart
from tests.dtypes.test_masters import F32, differences, expected_of
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def prepare(path: Path) -> tuple[bool, list[str]]:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = zerostart.load(
        path, engine="fsdp2", dtype=torch.bfloat16, engine_config={"mp_policy": policy}, progress=False
    )
    out = fsdp2_prepare_model(SimpleNamespace(mixed_precision="bf16"), model)
    return out is model, differences(dict(zerostart.full_tensors(out, rank=None)), expected_of(path, F32))


@pytest.mark.slow
def test_masters_stay_exact_through_accelerates_preparation(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe", F32)
    assert run_ranks(prepare, 2, path) == [(True, [])] * 2
