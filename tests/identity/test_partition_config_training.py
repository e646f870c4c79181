"""Tensors cut by DeepSpeed's ``tensor_parallel`` section, run under FSDP2, train as one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.identity.test_parallel_fsdp2 import train
from tests.parity import alone, checkpoint, differences
from tests.ranks import run_ranks

NORMS = {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
HEAD = {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True}
SECTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {"preset_model": "qwen2", "partition_config": {"layer_specs": [NORMS]}},
    "mixtral": {
        "partition_config": {
            "layer_specs": [
                {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
                {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
                HEAD,
            ]
        }
    },
}


@pytest.mark.parametrize(("kind", "world"), [("qwen3", 2), ("mixtral", 2)])
def test_a_partition_config_trains_as_in_one_process(kind: str, world: int, tmp_path: Path) -> None:
    path = checkpoint(kind, tmp_path)
    wanted = run_ranks(alone, 1, path)[0]
    options = {"tensor_parallel": 2, "engine_config": {"tensor_parallel": SECTIONS[kind]}}
    for found in run_ranks(train, world, path, 1, options):
        assert differences(found, wanted) == []
