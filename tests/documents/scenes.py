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
    # A picture of 16 by 16, in two steps.
    'pipe("a cat sees the sea")': (
        'pipe("a cat sees the sea", height=16, width=16, num_frames=5, num_inference_steps=2, '
        "max_sequence_length=12)"
    ),
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


def _followed() -> Names:
    """A model that is trained, and one on another engine that follows it."""
    return {**_common(), "student": _loaded(), "teacher": _loaded("deepspeed")}


def _served() -> Names:
    """A model that is trained, and an engine in each rank that takes all of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerostart import serving

    engine: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("path/or/hub-id"))
    engine.load_weights = lambda weights: engine.load_state_dict(dict(weights), strict=False)
    return {**_common(), "serving": serving, "model": _loaded(), "engine": engine}


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


def _shared_sequences() -> Names:
    """A configuration for shared sequences, and the path of a model whose heads two ranks can share."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": 2,
    }
    return {**_common(), "path": "path/or/hub-id", "config": config}


def _video() -> Names:
    torch.manual_seed(0)
    return {**_common(), "video": torch.randn(1, 3, 1, 16, 16, device="cpu")}


def _blocks() -> Names:
    def block(hidden: torch.Tensor, temb: torch.Tensor, rotary: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return hidden * temb + rotary[0] - rotary[1]

    ones = torch.ones(3, device="cpu")
    return {
        **_common(),
        "block": block,
        "hidden": ones.clone().requires_grad_(),
        "temb": ones,
        "cos": ones,
        "sin": ones,
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


def _migrating() -> Names:
    """A checkpoint of transformers' Llama, and the same weights as torchtitan saves them."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM

    if not Path("path/llama").exists():
        size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(**size, **heads, tie_word_embeddings=False)
        torch.manual_seed(0)  # each rank writes a part
        model = LlamaForCausalLM(config)
        names = {
            **{"model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.layers": "layers"},
            **{"model.norm": "norm", "input_layernorm": "attention_norm", "self_attn": "attention"},
            **{"post_attention_layernorm": "ffn_norm", "mlp": "feed_forward", "gate_proj": "w1"},
            **{
                "down_proj": "w2",
                "up_proj": "w3",
                "q_proj": "wq",
                "k_proj": "wk",
                "v_proj": "wv",
                "o_proj": "wo",
            },
        }
        state: Names = {}
        for name, tensor in model.state_dict().items():
            moved = name
            for ours, theirs in names.items():
                moved = moved.replace(ours, theirs)
            if moved.endswith(("wq.weight", "wk.weight")):
                count = 4 if "wq" in moved else 2
                tensor = tensor.view(count, 2, -1, 16).transpose(1, 2).reshape(tensor.shape)
            state[moved] = tensor.contiguous()
        state["optimizer"] = {"state": {"norm.weight": {"exp_avg": torch.ones(16, device="cpu")}}}
        state["train_state"] = {"step": torch.tensor(1000, device="cpu")}
        dist.barrier()
        dcp.save(state, checkpoint_id="outputs/checkpoint/step-1000")
        if dist.get_rank() == 0:
            model.save_pretrained("path/llama")
        dist.barrier()
    return _common()


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
    Scene("README.md", "WanTransformer3DModel", {"path": "releases:wan"}, _common),
    Scene("README.md", "", {**MODEL, "path/to/checkpoint": "qwen3"}, _common, slow=False),
    Scene("docs/index.md", "", {"path/to/checkpoint": "qwen3"}, _common, slow=False),
    Scene("docs/adoption.md", "TrainingArguments(", {"path/or/hub-id": "qwen3"}, _trainer),
    Scene("docs/adoption.md", "", {"path/mixture": "qwen3_moe_aligned"}, _edited, slow=False),
    Scene("docs/converters.md", given=_stored, slow=False),
    Scene("docs/diffusion.md", "", {"path/Qwen-Image": "pipeline:qwen_image"}, _video),
    Scene("docs/flow-matching.md", given=_common, slow=False),
    Scene("docs/refit.md", "student", {"path/or/hub-id": "qwen3"}, _followed),
    Scene("docs/refit.md", "", {"path/or/hub-id": "qwen3"}, _served),
    Scene("docs/parallelism.md", "", {"path/or/hub-id": "qwen3_even"}, _shared_sequences),
    Scene("docs/migrating.md", "", {"path/or/hub-id": "qwen3"}, _migrating),
    Scene("docs/pipelines.md", "", {"path/Wan2.1-T2V-14B-Diffusers": "pipeline:wan"}, _blocks),
    Scene("docs/placements.md", "nvme", {"path/or/hub-id": "qwen3_wide"}, _common),
    Scene("docs/placements.md", "", MODEL, _common, slow=False),
    Scene("docs/preemption.md", "", {"path/or/hub-id": "qwen3"}, _trained, slow=False),
    Scene("docs/resuming.md", "", {"path/or/hub-id": "qwen3"}, _trained, slow=False),
    Scene("docs/starting.md", "", {"path/or/hub-id": "qwen3", "path/encoder": "qwen3"}, _started, slow=False),
    Scene("docs/verify.md", "", {"path/or/hub-id": "qwen3"}, _saved, slow=False),
    Scene("docs/zero12.md", "is_last", {"path/or/hub-id": "qwen3"}, _accumulated, slow=False),
    Scene("docs/zero12.md", "", {"path/or/hub-id": "qwen3"}, _common, slow=False),
)
