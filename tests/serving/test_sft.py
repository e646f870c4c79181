"""Compare TRL's SFT with LoRA on experts that ranks share with one process.

The test is among those of serving, because their environment (``make serving``) has TRL.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.launching import write_tokenizer
from tests.integrations.scripts import SEQUENCES, fsdp2, zero3
from tests.parity import VOCABULARY, checkpoint
from tests.ranks import run_ranks

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

ADAPTER = "adapter_model.safetensors"
LORA = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def fine_tune(
    path: Path, out: Path, environment: dict[str, str], options: dict[str, Any], adopt: dict[str, Any] | None
) -> list[float]:
    """Take five steps of SFT as in a user's script; save the adapters."""
    os.environ.update(environment)
    if adopt is not None:
        import zerostart

        zerostart.enable(**adopt)
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    arguments: Any = SFTConfig(
        str(out),
        max_steps=5,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        seed=3,
        ddp_backend="gloo",
        model_init_kwargs={"dtype": "float32"},
        adam_epsilon=1e-4,
        # TRL's default adds the model's auxiliary loss. That is not a mean over tokens, so with any data
        # parallelism it differs from the loss of the whole batch.
        router_aux_loss_coef=0.0,
        **options,
    )
    torch.manual_seed(0)
    trainer = SFTTrainer(
        model=str(path),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": SEQUENCES.tolist()}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", init_lora_weights="gaussian", **LORA),
    )
    trainer.train()
    trainer.save_model(str(out))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_sft_with_adapters_of_shared_experts(kind: str, engine: str, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = checkpoint(kind, folder)
    write_tokenizer(path, VOCABULARY)
    zero = {"stage": 2 if engine == "zero2" else 3}
    environment = fsdp2() if engine == "fsdp2" else zero3(tmp_path / "config", zero_optimization=zero)
    cpu = {"use_cpu": True} if engine == "fsdp2" else {}
    ours = run_ranks(
        fine_tune,
        2,
        path,
        tmp_path / "ours",
        environment,
        {"per_device_train_batch_size": 2, **cpu},
        {"expert_parallel": 2},
        process_group=False,
        timeout=240,
    )
    options = {"per_device_train_batch_size": 4, "use_cpu": True}
    (alone,) = run_ranks(fine_tune, 1, path, tmp_path / "alone", {}, options, None, process_group=False)
    assert ours == [pytest.approx(alone, rel=1e-5)] * 2
    adapters, expected = (load_file(tmp_path / name / ADAPTER) for name in ("ours", "alone"))
    assert adapters.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(adapters[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    models = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / name)
        for name in ("ours", "alone")
    ]
    actual, reference = (model(input_ids=SEQUENCES[:2]).logits for model in models)
    torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-5)
