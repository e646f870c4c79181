"""What the Python blocks of the pages are run in: folders by the names in them, and what they take as given.

Nothing in a block is changed to point at a test's model: ``path/or/hub-id`` *is* a folder in the directory
that a scene runs in, with a tiny checkpoint. What has to be changed all the same stands in ``CHANGED``, with
the reason.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Names = dict[str, Any]

#: Text in a block, and what stands there when it is run.
CHANGED: Mapping[str, str] = {
    # One process group runs a whole scene.
    "dist.init_process_group()": "dist.is_initialized() or dist.init_process_group()",
    # A name of this run's own.
    '"my-run"': '"my-run-" + str(__import__("os").getppid())',
    '"file:///shared/': '"file://" + __import__("os").getcwd() + "/',
    # A disk that every machine has, and buffers for tiny layers.
    '"/nvme/swap"': '"nvme"',
    "200_000_000": "2_000_000",
    # Hosts without a device: the Trainer wants to be told, and there is no page-locked memory.
    "bf16=True": "use_cpu=True",
    '{"device": "cpu", "pin_memory": True}': '{"device": "cpu", "pin_memory": False}',
    "CPUOffloadPolicy(pin_memory=True)": "CPUOffloadPolicy(pin_memory=False)",
}


@dataclass(frozen=True)
class Scene:
    """The blocks of a page in which ``having`` stands, in their order, in one namespace on each of ``ranks``.

    ``models`` are folders to be made, by name: a tiny checkpoint (``tests/tiny.py``) or ``pipeline:FAMILY``.
    ``given`` makes the names that the page takes as given, on each rank, in the directory of the scene.
    """

    page: str
    having: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    given: Callable[[], Names] = dict
    ranks: int = 2
    slow: bool = True

    @property
    def id(self) -> str:
        return f"{self.page} {self.having}".strip()


def scene_of(page: str, text: str) -> Scene | None:
    """The first scene of the page that the block belongs to."""
    return next((one for one in SCENES if one.page == page and one.having in text), None)


def _common() -> Names:
    import deepspeed
    import torch.distributed as dist
    from torch import nn

    import zerostart

    return {"torch": torch, "dist": dist, "nn": nn, "deepspeed": deepspeed, "zerostart": zerostart}


def _loaded(engine: str = "fsdp2", path: str = "path/or/hub-id") -> Any:
    import zerostart

    return zerostart.load(path, engine=engine, progress=False)


def _trained() -> Names:
    """A model on FSDP2 with an optimizer and a schedule."""
    model = _loaded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {**_common(), "model": model, "optimizer": optimizer, "schedule": schedule}


def _accumulated() -> Names:
    tokens = torch.arange(12, device="cpu").reshape(2, 6)
    model = _loaded().train()
    return {**_common(), "model": model, "batches": [{"input_ids": tokens, "labels": tokens}] * 2}


def _edited() -> Names:
    return {**_common(), "model": _loaded(path="path/mixture")}


def _saved() -> Names:
    import zerostart

    model = _loaded()
    zerostart.save(model, "out")
    zerostart.save(model, "other")
    return {**_common(), "model": model}


def _started() -> Names:
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
        **_common(),
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "config": config,
        "ds_config": ds_config,
        "decoder_config": config,
        "build_and_fill": lambda: torch.nn.Linear(8, 8, device="cpu"),
        "Composite": Composite,
    }


def _stored() -> Names:
    """Files of other layouts than the modules of the page."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        draw = torch.Generator("cpu").manual_seed(0)

        def shaped(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, device="cpu")

        qkv, norm = {"weight": (48, 16), "bias": (48,)}, {"weight": (16,), "bias": (16,)}
        tensorflow = {"weight": "gamma", "bias": "beta"}
        renamed = {f"module.norm.{tensorflow[kind]}": shaped(*shape) for kind, shape in norm.items()}
        save_file(
            renamed | {f"module.qkv.{k}": shaped(*shape) for k, shape in qkv.items()}, "renamed.safetensors"
        )
        apart = {f"{part}_proj.{k}": shaped(n[0] // 3, *n[1:]) for part in "qkv" for k, n in qkv.items()}
        save_file(apart | {f"norm.{k}": shaped(*shape) for k, shape in norm.items()}, "apart.safetensors")
        torch.save({"c_attn.weight": shaped(16, 48), "c_attn.bias": shaped(48)}, "fused.pt")
    dist.barrier()
    return {}


def _trainer() -> Names:
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
    return {**_common(), "data": [{"input_ids": tokens, "labels": tokens}] * 4}


MODEL = {"path/or/hub-id": "qwen3_moe_aligned"}
SCENES = (
    Scene("README.md", "", MODEL, _common, slow=False),
    Scene("docs/index.md", "", {"path/to/checkpoint": "qwen3"}, _common, slow=False),
    Scene("docs/adoption.md", "TrainingArguments(", {"path/or/hub-id": "qwen3"}, _trainer),
    Scene("docs/adoption.md", "", {"path/mixture": "qwen3_moe_aligned"}, _edited, slow=False),
    Scene("docs/converters.md", given=_stored, slow=False),
    Scene("docs/flow-matching.md", given=_common, slow=False),
    Scene("docs/placements.md", "is_last", {"path/or/hub-id": "qwen3"}, _accumulated, slow=False),
    Scene("docs/placements.md", "nvme", {"path/or/hub-id": "qwen3_wide"}, _common),
    Scene("docs/placements.md", "", MODEL, _common, slow=False),
    Scene("docs/resuming.md", "", {"path/or/hub-id": "qwen3"}, _trained, slow=False),
    Scene("docs/starting.md", "", {"path/or/hub-id": "qwen3", "path/encoder": "qwen3"}, _started, slow=False),
    Scene("docs/saving.md", "", {"path/or/hub-id": "qwen3"}, _saved, slow=False),
)
