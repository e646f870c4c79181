"""The Trainer on FSDP2 with the axes of accelerate's ``ParallelismConfig``: it trains as one process does."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zerostart
from tests.integrations.scripts import accelerate_script, fsdp2, trainer_script
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

MODEL = "qwen3_even"
ROWS = 2


def axes(**sizes: int) -> dict[str, str]:
    """The environment that ``accelerate launch`` makes of them."""
    named = {f"PARALLELISM_CONFIG_{key.upper()}_SIZE": str(size) for key, size in sizes.items()}
    return {**fsdp2(), "ACCELERATE_USE_PARALLELISM_CONFIG": "true", **named}


def run(path: Path, out: Path, environment: dict[str, str], adopt: Any, world: int, rows: int) -> Any:
    given = {"batch_size": rows, "use_cpu": True}
    found = run_ranks(
        trainer_script, world, path, out, environment, given, adopt, {}, process_group=False, timeout=200
    )
    assert all(one["losses"] == found[0]["losses"] for one in found)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "batches"),
    [({"cp": 2, "tp": 2}, 1), ({"dp_shard": 2, "tp": 2}, 2), ({"dp_replicate": 2, "dp_shard": 2}, 4)],
    ids=str,
)
def test_trainer(sizes: dict[str, int], batches: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints(MODEL)
    ours = run(path, tmp_path / "ours", axes(**sizes), {}, 4, ROWS)
    alone = run(path, tmp_path / "alone", {}, None, 1, ROWS * batches)
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    wanted = load_file(tmp_path / "alone" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        # Adam moves an element by its gradient's sign, however small that is.
        assert (tensor - wanted[name]).norm() <= 1e-3 * wanted[name].norm(), name
    assert ours["read"] <= sum(file.stat().st_size for file in path.glob("*.safetensors")) * 0.8


@pytest.mark.slow
def test_adapters_on_replicas(checkpoints: TinyCheckpoints) -> None:
    """As accelerate's own FSDP2 trains them on as many ranks, without replicas."""
    path, more = checkpoints(MODEL), ("no", False, True)
    stock = run_ranks(accelerate_script, 4, path, fsdp2(), None, *more, process_group=False)[0]
    environment = axes(dp_replicate=2, dp_shard=2)
    for ours in run_ranks(accelerate_script, 4, path, environment, {}, *more, process_group=False):
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-5)


def refusals(path: Path, environment: dict[str, str]) -> list[str]:
    """What is said of other ranks than the model was loaded for, and of adapters on what ranks share."""
    os.environ.update(environment)
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    said = []
    with zerostart.enabled(progress=False):
        accelerator = Accelerator(cpu=True)
        shared = AutoModelForCausalLM.from_pretrained(path)
        assert shared.model.layers[0].self_attn.q_proj.weight.device_mesh.mesh_dim_names[-1] == "tensor"
        adapted: Any = get_peft_model(shared, LoraConfig(target_modules=["q_proj"]))
        whole = zerostart.load(path, engine="fsdp2", progress=False)
        for model in (adapted, whole):
            with pytest.raises(zerostart.errors.ConfigError) as caught:
                accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_what_is_refused(checkpoints: TinyCheckpoints) -> None:
    environment = axes(tp=2, dp_shard=2)
    for told in run_ranks(refusals, 4, checkpoints(MODEL), environment, process_group=False):
        assert "lora_A.default.weight was added to a model that was loaded with tensor_parallel=2" in told[0]
        assert "loaded with tensor_parallel=1, but accelerate has 2 ranks share tensors" in told[1]
