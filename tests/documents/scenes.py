"""Scenes: folders and variables that the Python blocks of the pages expect.

A block is not edited to name a test's model: ``path/or/hub-id`` is a folder with a tiny checkpoint in the
scene's directory. ``SUBSTITUTIONS`` has the few replacements, with their reasons.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Names = dict[str, Any]

#: Text in a block, and its replacement when it is run.
SUBSTITUTIONS: Mapping[str, str] = {
    # One process group runs a whole scene.
    "dist.init_process_group()": "dist.is_initialized() or dist.init_process_group()",
    # A name unique to this run.
    '"my-run"': '"my-run-" + str(__import__("os").getppid())',
    '"file:///shared/': '"file://" + __import__("os").getcwd() + "/',
    # A disk that every machine has, and buffers for tiny layers.
    '"/nvme/swap"': '"nvme"',
    "200_000_000": "2_000_000",
    # Hosts without an accelerator: the Trainer needs use_cpu, and there is no page-locked memory.
    "bf16=True": "use_cpu=True",
    '{"device": "cpu", "pin_memory": True}': '{"device": "cpu", "pin_memory": False}',
    "CPUOffloadPolicy(pin_memory=True)": "CPUOffloadPolicy(pin_memory=False)",
}


@dataclass(frozen=True)
class Scene:
    """The blocks of a page that contain ``text``, run in one namespace.

    ``models`` are folders (``folders.py``). ``make_names`` returns the variables that the page expects; each
    rank calls it in the scene's directory.
    """

    page: str
    text: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    make_names: Callable[[], Names] = dict
    ranks: int = 2
    slow: bool = True

    @property
    def id(self) -> str:
        return f"{self.page} {self.text}".strip()


def scene_of(page: str, text: str) -> Scene | None:
    """Return the first scene of the page that the block belongs to."""
    return next((scene for scene in SCENES if scene.page == page and scene.text in text), None)


def _base_names() -> Names:
    import deepspeed
    import torch.distributed as dist
    from torch import nn

    import zerostart

    return {"torch": torch, "dist": dist, "nn": nn, "deepspeed": deepspeed, "zerostart": zerostart}


def _load(engine: str = "fsdp2", path: str = "path/or/hub-id") -> Any:
    import zerostart

    return zerostart.load(path, engine=engine, progress=False)


def _training_names() -> Names:
    """Return a model on FSDP2 with an optimizer and a schedule."""
    model = _load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {**_base_names(), "model": model, "optimizer": optimizer, "schedule": schedule}


def _accumulation_names() -> Names:
    tokens = torch.arange(12, device="cpu").reshape(2, 6)
    model = _load().train()
    return {**_base_names(), "model": model, "batches": [{"input_ids": tokens, "labels": tokens}] * 2}


def _mixture_names() -> Names:
    return {**_base_names(), "model": _load(path="path/mixture")}


def _save_models() -> Names:
    import zerostart

    model = _load()
    zerostart.save(model, "out")
    zerostart.save(model, "other")
    return {**_base_names(), "model": model}


def _start_names() -> Names:
    from transformers import AutoConfig, AutoModelForCausalLM

    class Composite(torch.nn.Module):
        def __init__(self, **parts: torch.nn.Module) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

    config = AutoConfig.from_pretrained("path/or/hub-id")
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    }
    return {
        **_base_names(),
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "config": config,
        "ds_config": ds_config,
        "decoder_config": config,
        "build_and_fill": lambda: torch.nn.Linear(8, 8, device="cpu"),
        "Composite": Composite,
    }


def _write_checkpoints() -> Names:
    """Write files whose layouts differ from the page's modules."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        generator = torch.Generator("cpu").manual_seed(0)

        def random_tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu")

        qkv, norm = {"weight": (48, 16), "bias": (48,)}, {"weight": (16,), "bias": (16,)}
        old_names = {"weight": "gamma", "bias": "beta"}
        renamed = {f"module.norm.{old_names[kind]}": random_tensor(*shape) for kind, shape in norm.items()}
        save_file(
            renamed | {f"module.qkv.{k}": random_tensor(*shape) for k, shape in qkv.items()},
            "renamed.safetensors",
        )
        separate = {
            f"{part}_proj.{k}": random_tensor(n[0] // 3, *n[1:]) for part in "qkv" for k, n in qkv.items()
        }
        save_file(
            separate | {f"norm.{k}": random_tensor(*shape) for k, shape in norm.items()}, "apart.safetensors"
        )
        torch.save({"c_attn.weight": random_tensor(16, 48), "c_attn.bias": random_tensor(48)}, "fused.pt")
    dist.barrier()
    return {}


def _trainer_names() -> Names:
    Path("ds_config_zero3.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": "auto"},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
            }
        )
    )
    tokens = list(range(8))
    return {**_base_names(), "data": [{"input_ids": tokens, "labels": tokens}] * 4}


MODEL = {"path/or/hub-id": "qwen3_moe_aligned"}
SCENES = (
    Scene("README.md", "", MODEL, _base_names, slow=False),
    Scene("docs/index.md", "", {"path/to/checkpoint": "qwen3"}, _base_names, slow=False),
    Scene("docs/adoption.md", "TrainingArguments(", {"path/or/hub-id": "qwen3"}, _trainer_names),
    Scene("docs/adoption.md", "", {"path/mixture": "qwen3_moe_aligned"}, _mixture_names, slow=False),
    Scene("docs/converters.md", make_names=_write_checkpoints, slow=False),
    Scene("docs/flow-matching.md", make_names=_base_names, slow=False),
    Scene("docs/placements.md", "is_last", {"path/or/hub-id": "qwen3"}, _accumulation_names, slow=False),
    Scene("docs/placements.md", "nvme", {"path/or/hub-id": "qwen3_wide"}, _base_names),
    Scene("docs/placements.md", "", MODEL, _base_names, slow=False),
    Scene("docs/resuming.md", "", {"path/or/hub-id": "qwen3"}, _training_names, slow=False),
    Scene(
        "docs/starting.md", "", {"path/or/hub-id": "qwen3", "path/encoder": "qwen3"}, _start_names, slow=False
    ),
    Scene("docs/saving.md", "", {"path/or/hub-id": "qwen3"}, _save_models, slow=False),
)
