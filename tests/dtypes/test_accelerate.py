"""accelerate's FSDP2 route raises parameters to fp32 as they are; a loaded model is left as it came."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerostart
from tests.dtypes.test_masters import F32, expected_of, unlike
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def prepared(path: Path) -> tuple[bool, list[str]]:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = zerostart.load(
        path, engine="fsdp2", dtype=torch.bfloat16, engine_config={"mp_policy": policy}, progress=False
    )
    result = fsdp2_prepare_model(SimpleNamespace(mixed_precision="bf16"), model)
    return result is model, unlike(dict(zerostart.full_tensors(result, rank=None)), expected_of(path, F32))


@pytest.mark.slow
def test_masters_stay_exact_through_accelerates_preparation(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe", F32)
    assert run_ranks(prepared, 2, path) == [(True, [])] * 2
