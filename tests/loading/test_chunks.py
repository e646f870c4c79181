"""Chunk size of a load: set by the argument or by DeepSpeed's configuration."""

import pytest
import torch

from tests.tiny import TinyCheckpoints
from zerostart.checkpoint.source import open_catalog
from zerostart.loading.request import Request

STREAM_CONFIG = {"zero_optimization": {"stage": 3, "stage3_partition_stream_chunk_size": 100_000}}


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 400_000), (torch.bfloat16, 200_000)])
def test_chunk_size_of_deepspeed_is_in_elements(
    dtype: torch.dtype, nbytes: int, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("qwen3", dtype)
    catalog, cpu = open_catalog(path), torch.device("cpu")
    from_config = Request(path, engine_config=STREAM_CONFIG)
    engine = from_config.resolve(1)
    assert from_config.tuning(engine, catalog, cpu, False).chunk_size == nbytes
    # The argument comes first, and the limit holds in any case.
    with_argument = Request(path, engine_config=STREAM_CONFIG, chunk_size=1 << 20)
    assert with_argument.tuning(engine, catalog, cpu, False).chunk_size == 1 << 20
    limited = Request(path, engine_config=STREAM_CONFIG, memory_limit=1 << 17)
    assert limited.tuning(engine, catalog, cpu, False).ring_bytes <= 1 << 17
