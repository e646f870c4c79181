"""Worker of a pretend engine, with fused parameters, tensor parallelism and a loader like vLLM's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: For each suffix of a checkpoint name: the fused parameter, and the part of it.
FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Engine(nn.Module):
    """Rank ``rank`` of ``size`` of a qwen3 model with a padded vocabulary."""

    def __init__(self, config: Mapping[str, Any], rank: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.head = config["head_dim"]
        self.heads = config["num_attention_heads"] // size
        self.kv_heads = max(1, config["num_key_value_heads"] // size)
        self.kv_copies = max(1, size // config["num_key_value_heads"])
        hidden, middle = config["hidden_size"], config["intermediate_size"] // size
        self.vocabulary = config["vocab_size"]
        self.rows = -(-self.vocabulary // 64) * 64 // size
        self.tied = config["tie_word_embeddings"]
        shapes = {"model.embed_tokens.weight": (self.rows, hidden), "model.norm.weight": (hidden,)}
        shapes["lm_head.weight"] = (self.rows, hidden)
        wide = (self.heads + 2 * self.kv_heads) * self.head
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.self_attn.qkv_proj.weight"] = (wide, hidden)
            shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, self.heads * self.head)
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (self.head,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (self.head,)
            shapes[f"{prefix}.mlp.gate_up_proj.weight"] = (2 * middle, hidden)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, middle)
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        self.names = {}
        for name, shape in shapes.items():
            self.names[name] = name.replace(".", "_")
            parameter = nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)
            self.register_parameter(self.names[name], parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            module, part = name.removesuffix(".weight"), None
            for ending, (fused, place) in FUSED.items():
                if module.endswith(f".{ending}"):
                    module, part = module.removesuffix(ending) + fused, place
                    break
            target = f"{module}.weight"
            self._copy_part(self.get_parameter(self.names[target]), target, part, tensor)
            loaded.add(target)
            if self.tied and name == "model.embed_tokens.weight":
                self._copy_part(
                    self.get_parameter(self.names["lm_head.weight"]), "lm_head.weight", None, tensor
                )
        return loaded

    def _copy_part(
        self, parameter: nn.Parameter, name: str, part: str | int | None, tensor: torch.Tensor
    ) -> None:
        data, rank = parameter.data, self.rank
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            begin = rank * self.rows
            mine = tensor[begin : min(begin + self.rows, self.vocabulary)]
            data[: mine.shape[0]].copy_(mine)
            data[mine.shape[0] :].fill_(0)
        elif part in ("q", "k", "v"):
            count = self.heads if part == "q" else self.kv_heads
            offset = {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}[str(part)] * self.head
            share = rank if part == "q" else rank // self.kv_copies
            rows = count * self.head
            data.narrow(0, offset, rows).copy_(tensor.narrow(0, share * rows, rows))
        elif part is not None:
            rows = data.shape[0] // 2
            data.narrow(0, int(part) * rows, rows).copy_(tensor.narrow(0, rank * rows, rows))
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            columns = data.shape[1]
            data.copy_(tensor.narrow(1, rank * columns, columns))
        else:
            data.copy_(tensor)


def loaded(
    config: Mapping[str, Any], rank: int, size: int, folder: Path, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the engine's parameters after its own load of ``folder``."""
    from safetensors import safe_open

    engine = Engine(config, rank, size, dtype)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            engine.load_weights((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
    return dict(engine.state_dict())


def main() -> None:
    """Serve; arguments: configuration file, rank, size, address, output folder."""
    import json

    from zerostart import serving
    from zerostart.refit.receiver import FillPlan

    config_path, rank, size, address, out = sys.argv[1:]
    config = json.loads(Path(config_path).read_text())
    engine = Engine(config, int(rank), int(size), getattr(torch, config.get("dtype", "bfloat16")))
    engine.to(config.get("device", "cpu"))
    receiver = serving.Receiver(engine, name=f"tp{rank}")
    strange = {"transformers", "diffusers", "deepspeed", "accelerate"} & sys.modules.keys()
    assert not strange, strange
    # Write each version to a file for the test.
    check = FillPlan.check

    def check_and_save(plan: FillPlan, sums: Any, version: int) -> None:
        check(plan, sums, version)
        part = Path(out) / f"part-tp{rank}-{version}"
        torch.save(engine.state_dict(), part)
        part.rename(Path(out) / f"tp{rank}-{version}.pt")

    if Path(out).is_dir():
        FillPlan.check = check_and_save  # type: ignore[method-assign]
    serving.serve(receiver, address, timeout=60)
    print("served", receiver.version)


def start(
    config: Path, rank: int, size: int, address: str, out: Path, **environment: str
) -> subprocess.Popen[str]:
    """Start a worker process."""
    command = [
        sys.executable,
        "-m",
        "tests.refit.workers",
        str(config),
        str(rank),
        str(size),
        address,
        str(out),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


if __name__ == "__main__":
    main()
