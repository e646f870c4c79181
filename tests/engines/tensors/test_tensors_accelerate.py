"""Tensor parallelism on DeepSpeed in an accelerate script with zerostart's one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import zerostart
from tests.parity import CLIP, ROWS, Trace, batches, checkpoint, differences, optimizer, train_in_one_process
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "by_accelerate"), [(2, True), (3, True), (1, False)])
def test_a_script_trains_like_one_process(stage: int, by_accelerate: bool, tmp_path: Path) -> None:
    """Configure by accelerate's ParallelismConfig, or in DeepSpeed's configuration."""
    path = checkpoint("qwen3", tmp_path)
    expected = run_ranks(train_in_one_process, 1, path)[0]
    for trace in run_ranks(script, 2, path, stage, by_accelerate, timeout=120):
        trace.gradients, trace.norms = expected.gradients, expected.norms
        assert differences(trace, expected) == []


def script(path: Path, stage: int, by_accelerate: bool) -> Trace:
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
    if not by_accelerate:
        config["tensor_parallel"] = {"autotp_size": 2}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(tp_size=2) if by_accelerate else None,
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
        out = path.parent / f"saved-{stage}-{by_accelerate}"
        accelerator.unwrap_model(model).save_pretrained(out)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            trace.weights = state
    accelerator.wait_for_everyone()
    # Not from_pretrained, which would partition the model by the ZeRO configuration that is still active.
    saved = load_file(out / "model.safetensors")
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in trace.weights.items())
    trace.weights = saved
    return trace
