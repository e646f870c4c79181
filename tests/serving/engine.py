"""One vLLM worker without an engine: ``python -m tests.serving.engine RANK WORLD FOLDER JOBS``.

For each job vLLM builds and loads a model. Pushes fill it, and before vLLM packs it, it is compared with
vLLM's own load of the trainer's save. ``JOBS`` is a file with a list of objects.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from zerostart import serving
from zerostart.refit.vllm import VLLMWeights


def make_config(path: str, world: int, expert_parallel: bool) -> Any:
    return EngineArgs(
        model=path,
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=world,
        enable_expert_parallel=expert_parallel,
    ).create_engine_config()


def load_by_vllm(config: Any, path: str) -> nn.Module:
    """Return a model filled by vLLM's loader, not packed."""
    config = copy.copy(config)
    config.compilation_config = copy.deepcopy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        model: Any = initialize_model(config)
    finally:
        torch.set_default_dtype(before)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    with torch.no_grad():
        model.load_weights(iter(tensors.items()))
    return model  # type: ignore[no-any-return]


class RecordingWeights(VLLMWeights):
    """Weights that copy each filled layer before vLLM packs it."""

    def stages(self, filled: Any) -> Iterator[AbstractContextManager[Any]]:
        self.filled: dict[str, torch.Tensor] = {}
        for stage in super().stages(filled):
            yield self._record(stage)

    @contextmanager
    def _record(self, stage: AbstractContextManager[Any]) -> Iterator[Any]:
        with stage as tensors:
            yield tensors
            self.filled |= {name: tensor.clone() for name, tensor in tensors.items()}


def run_job(job: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Run two pushes into a model, and compare it with vLLM's own load."""
    config = make_config(job["checkpoint"], world, job["expert_parallel"])
    config.parallel_config.rank = rank
    os.environ["VLLM_DIST_IDENT"] = Path(job["rendezvous"]).name
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"file://{job['rendezvous']}", rank, "gloo")
        initialize_model_parallel(world, 1)
        try:
            model = load_by_vllm(config, job["checkpoint"])
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            packed = {name: t.data_ptr() for name, t in model.named_parameters()}
            weights = RecordingWeights(model, config, "vLLM")
            with serving.Connection(
                serving.Receiver(weights, name=f"worker-{rank}"), job["address"], timeout=120
            ) as connection:
                version = [connection.follow(), connection.follow()][-1]
            expected = dict(load_by_vllm(config, job["saved"]).named_parameters())
            differing = [
                name
                for name in weights.filled
                if name in expected and not torch.equal(weights.filled[name], expected[name].data)
            ]
            return {
                "version": version,
                "differing": differing,
                "compared": len(weights.filled.keys() & expected.keys()),
                "left": sorted(expected.keys() - weights.filled.keys()),
                # CUDA graphs would continue to use the old memory.
                "moved": [n for n, t in model.named_parameters() if t.data_ptr() != packed[n]],
            }
        finally:
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    number, count = int(sys.argv[1]), int(sys.argv[2])
    Path(sys.argv[3], f"ready-{number}").touch()
    for index, job in enumerate(json.loads(Path(sys.argv[4]).read_text())):
        Path(sys.argv[3], f"{index}-{number}.json").write_text(json.dumps(run_job(job, number, count)))
