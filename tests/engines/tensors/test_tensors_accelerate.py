"""Tensors that DeepSpeed's ranks share, in an accelerate script with the one line of zerostart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import zerostart
from tests.parity import CLIP, ROWS, Trace, alone, batches, checkpoint, differences, optimizer
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "named"), [(2, True), (3, True), (1, False)])
def test_a_script_trains_as_one_process(stage: int, named: bool, tmp_path: Path) -> None:
    """``named``: by accelerate's ParallelismConfig, and not in DeepSpeed's configuration."""
    path = checkpoint("qwen3", tmp_path)
    wanted = run_ranks(alone, 1, path)[0]
    for found in run_ranks(script, 2, path, stage, named, timeout=120):
        found.gradients, found.norms = wanted.gradients, wanted.norms
        assert differences(found, wanted) == []


def script(path: Path, stage: int, named: bool) -> Trace:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.utils import ParallelismConfig
    from transformers import AutoModelForCausalLM

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
    }
    if not named:
        config["tensor_parallel"] = {"autotp_size": 2}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(tp_size=2) if named else None,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    rows = [{"input_ids": row, "labels": row} for batch in batches(1) for row in batch[0]]
    trace = Trace()
    with zerostart.enabled(progress=False):
        model: Any = AutoModelForCausalLM.from_pretrained(path).train()
        assert len(model.model.layers[0].self_attn.q_proj._partition_sizes) == 2
        client = optimizer(model)
        loader: Any = DataLoader(rows, batch_size=ROWS)  # type: ignore[arg-type]
        model, client, loader = accelerator.prepare(model, client, loader)
        for batch in loader:
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            client.step()
            client.zero_grad()
            trace.losses.append(loss.item())
        place = path.parent / f"saved-{stage}-{named}"
        accelerator.unwrap_model(model).save_pretrained(place)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            trace.weights = state
    accelerator.wait_for_everyone()
    # Not by transformers, which would partition it: its configuration of ZeRO is still there.
    saved = load_file(place / "model.safetensors")
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in trace.weights.items())
    trace.weights = saved
    return trace
