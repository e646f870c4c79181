"""Fine-tuning scripts as users write them, with or without zerostart's line."""

import json
import os
from pathlib import Path
from typing import Any

import torch

SEQUENCES = torch.randint(3, 80, (16, 12), generator=torch.Generator().manual_seed(5))


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(SEQUENCES)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = {"input_ids": SEQUENCES[index], "labels": SEQUENCES[index]}
        if "PARALLELISM_CONFIG_SP_SIZE" in os.environ:
            item["position_ids"] = torch.arange(SEQUENCES.shape[1])  # required by Ulysses
        return item


def sequences(key: str, size: int = 2) -> dict[str, str]:
    """Return ``accelerate launch``'s environment for ranks that share sequences."""
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        f"PARALLELISM_CONFIG_{key}_SIZE": str(size),
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
    }


def zero3(folder: Path, **overrides: Any) -> dict[str, str]:
    """Return ``accelerate launch``'s environment for a DeepSpeed ZeRO-3 configuration."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        **overrides,
    }
    folder.mkdir(exist_ok=True)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
    }


def fsdp2(**overrides: str) -> dict[str, str]:
    """Return ``accelerate launch``'s environment for an FSDP2 configuration."""
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        **overrides,
    }


def training_arguments(out: Path, **options: Any) -> Any:
    """Return the Trainer's arguments for a short training without checkpoints."""
    from transformers import TrainingArguments

    # Without a backend, accelerate would run one process on hosts without an accelerator.
    defaults = {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "ddp_backend": "gloo"}
    return TrainingArguments(
        output_dir=str(out), **{**defaults, "report_to": [], "disable_tqdm": True, **options}
    )


def trainer_script(
    path: Path,
    out: Path,
    environment: dict[str, str],
    arguments: dict[str, Any],
    adopt: dict[str, Any] | None,
    loading: dict[str, Any],
) -> dict[str, Any]:
    """Train with the HF Trainer, with ``zerostart.enable(**adopt)`` unless ``adopt`` is None."""
    os.environ.update(environment)
    if "FSDP_VERSION" in environment and adopt is None:
        from zerostart.upstream.accelerate.preparing import AcceleratorPatches

        # Enables accelerate's own FSDP2 on CPUs.
        AcceleratorPatches(lambda model: False, lambda accelerator, model: None).open()
    from transformers import AutoModelForCausalLM, Trainer

    if adopt is not None:
        import zerostart

        zerostart.enable(**adopt)
    lora, batch_size = arguments.pop("lora", None), arguments.pop("batch_size", 2)
    args = training_arguments(
        out, **{"max_steps": 3, "per_device_train_batch_size": batch_size, "seed": 3, **arguments}
    )
    model: Any = AutoModelForCausalLM.from_pretrained(path, **loading)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(7)
        model = get_peft_model(model, LoraConfig(**lora))
    trainer = Trainer(model=model, args=args, train_dataset=Data())
    trainer.train()
    trainer.save_model(str(out))
    logs = trainer.state.log_history
    result: dict[str, Any] = {
        "losses": [entry["loss"] for entry in logs if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in logs if "grad_norm" in entry],
    }
    if adopt is not None:
        result["report"] = zerostart.report(model)
        result["read"] = zerostart.report(model).read_bytes
        result["model"] = type(model).__mro__[0].__name__
    return result


def accelerate_script(
    path: Path,
    environment: dict[str, str],
    adopt: dict[str, Any] | None,
    precision: str,
    model_first: bool = False,
    adapter: bool = False,
    loading: dict[str, Any] | None = None,
    accumulation: int = 1,
    on_host: bool = True,
) -> dict[str, Any]:
    """Train in a custom loop with accelerate, like transformers' ``run_clm_no_trainer``."""
    os.environ.update(environment)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from transformers import AutoModelForCausalLM, set_seed

    if adopt is not None:
        import zerostart

        zerostart.enable(**adopt)
    elif "FSDP_VERSION" in environment:
        from zerostart.upstream.accelerate.preparing import AcceleratorPatches

        AcceleratorPatches(lambda model: False, lambda accelerator, model: None).open()

    def make_accelerator() -> Accelerator:
        if not on_host:
            return Accelerator(mixed_precision=precision)
        if "FSDP_VERSION" in environment:
            return Accelerator(mixed_precision=precision, cpu=True)
        handlers = [InitProcessGroupKwargs(backend="gloo")]
        return Accelerator(mixed_precision=precision, kwargs_handlers=handlers)

    set_seed(11)
    accelerator = None if model_first else make_accelerator()
    model = AutoModelForCausalLM.from_pretrained(path, **(loading or {}))
    accelerator = accelerator or make_accelerator()
    if adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(7)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(Data(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for _, batch in zip(range(4), loader, strict=False):
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        norms.append(float(norm) if norm is not None else 0.0)
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: t.detach().float().cpu() for n, t in state.items()} if state else {},
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    }
