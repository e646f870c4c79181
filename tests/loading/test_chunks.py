"""Where the size of a chunk comes from: the argument, DeepSpeed's configuration, or the machine."""

import pytest
import torch

from tests.tiny import TinyCheckpoints
from zerostart.checkpoint.source import open_catalog
from zerostart.loading.request import Request

STREAMED = {"zero_optimization": {"stage": 3, "stage3_partition_stream_chunk_size": 100_000}}


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 400_000), (torch.bfloat16, 200_000)])
def test_deepspeed_counts_elements(dtype: torch.dtype, nbytes: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", dtype)
    catalog, cpu = open_catalog(path), torch.device("cpu")
    streamed = Request(path, engine_config=STREAMED)
    engine = streamed.resolve(1)
    assert streamed.tuning(engine, catalog, cpu, False).chunk_size == nbytes
    # The argument comes first, and the limit holds in any case.
    given = Request(path, engine_config=STREAMED, chunk_size=1 << 20)
    assert given.tuning(engine, catalog, cpu, False).chunk_size == 1 << 20
    limited = Request(path, engine_config=STREAMED, memory_limit=1 << 17)
    assert limited.tuning(engine, catalog, cpu, False).ring_bytes <= 1 << 17
