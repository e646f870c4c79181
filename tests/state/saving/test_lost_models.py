"""What users do to keep a model that is in shards: it is kept, or they are told; never a file without it."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zerostart
from tests.conformance.checkpoints import randomise
from tests.conformance.diffusion_suite import family
from tests.ranks import run_ranks
from zerostart.errors import EngineError

CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"engine": "deepspeed", "zero_stage": 3, "engine_config": CONFIG},
    "ZeRO-2": {"engine": "deepspeed", "zero_stage": 2},
    "FSDP2": {"engine": "fsdp2", "zero_stage": 3},
}


def engine_of(model: nn.Module) -> Any:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **CONFIG}
    config["zero_optimization"] = {"stage": 3, **CONFIG["zero_optimization"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def keep(path: Path, out: Path) -> list[str]:
    """What goes unsaid, and what does not work that should."""
    wrong = []
    rank = torch.distributed.get_rank()
    for way, options in WAYS.items():
        model: Any = zerostart.load(path, progress=False, **options)
        model.save_pretrained(out / way)
        if way != "ZeRO-3":
            continue
        weight = next(n for n, _ in model.named_parameters() if n.endswith("to_q.weight"))
        with zerostart.gathered(model, weight) as whole:
            torch.save(whole, out / f"{rank}.pt")
        model.load_state_dict(model.state_dict())
        for called in (model, model.x_embedder):
            with pytest.raises(EngineError, match=r"nothing gathers it yet: call deepspeed\.initialize"):
                called(torch.ones(1, model.config.in_channels))
        engine = engine_of(model)
        engine.save_checkpoint(str(out / "checkpoint"))
        file = next((out / "checkpoint").rglob("zero_pp_rank_0*_model_states.pt"))
        stored = torch.load(file, weights_only=False)
        if {type(t) for t in stored["module"].values()} != {torch.Tensor}:
            wrong.append("DeepSpeed's checkpoint has tensors of another class")
        engine.load_checkpoint(str(out / "checkpoint"))
        model.x_embedder(torch.ones(1, model.config.in_channels))
        model.save_pretrained(out / way)
    return wrong


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer of diffusers."""
    one = family("flux")
    model = getattr(diffusers, one.kind).from_config(one.config)
    randomise(model)
    found = tmp_path_factory.mktemp("lost") / "model"
    model.save_pretrained(found)
    return found


@pytest.mark.slow
def test_a_model_in_shards_is_not_lost(path: Path, tmp_path: Path) -> None:
    assert run_ranks(keep, 2, path, tmp_path) == [[], []]
    original = load_file(next(path.glob("*.safetensors")))
    for way in WAYS:
        saved = load_file(next((tmp_path / way).glob("*.safetensors")))
        assert saved.keys() == original.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in original.items()), way
        written = diffusers.FluxTransformer2DModel.load_config(tmp_path / way)
        assert written["_class_name"] == diffusers.FluxTransformer2DModel.load_config(path)["_class_name"]
