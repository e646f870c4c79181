"""A script of TRL with five steps of GRPO and completions from vLLM.

``accelerate launch`` runs it on each rank: ``script.py MODEL OUT OPTIONS [ours]``. Each rank writes
``OUT/RANK.json``: rewards, the log, and a digest of the engine's weights after each synchronisation. With
``ours`` it has the added line, otherwise everything is TRL's.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils

model, out, given, *ours = sys.argv[1:]
options = json.loads(given)
if ours:
    import zerostart

    zerostart.enable()
if options.pop("unpacked", False):
    # On a CPU vLLM packs weights after its first load, and TRL's own synchronisation cannot load any more.
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False

from datasets import Dataset  # noqa: E402  # after zerostart, as in any script
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

rewards: list[list[float]] = []
served: list[str] = []


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a number that differs between texts, so that training changes the weights."""
    words = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    rewards.append([sum(number % 7 for number in each) / (1 + len(each)) for each in words])
    return rewards[-1]


peft: dict[str, Any] = {}
if options.pop("lora", False):
    from peft import LoraConfig

    peft["peft_config"] = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
prompts = [" ".join(f"w{3 + (5 * row + word) % 70}" for word in range(5)) for row in range(32)]
arguments = GRPOConfig(
    f"{out}/run",
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=8,
    max_steps=5,
    learning_rate=5e-2,
    lr_scheduler_type="constant",
    use_vllm=True,
    vllm_max_model_length=64,
    vllm_gpu_memory_utilization=0.2,
    report_to="none",
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    seed=3,
    **options,
)
torch.manual_seed(0)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    **peft,
)
generation: Any = trainer.vllm_generation
synchronise = generation.sync_weights


def followed() -> None:
    synchronise()
    if generation.mode == "colocate":
        worker = generation.llm.llm_engine.model_executor.driver_worker
        digest = hashlib.blake2b()
        for name, tensor in worker.model_runner.model.named_parameters():
            digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        served.append(digest.hexdigest())


generation.sync_weights = followed
trainer.train()
generation.sync_weights()
trainer.save_model(f"{out}/saved")
log = [{k: line[k] for k in ("loss", "reward", "grad_norm")} for line in trainer.state.log_history[:-1]]
rank = trainer.accelerator.process_index
Path(f"{out}/{rank}.json").write_text(json.dumps({"rewards": rewards, "log": log, "served": served}))
