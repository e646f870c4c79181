"""A refit's plan at scale, rehearsed: no weights, no ranks, no engine.

    python benchmarks/refit_scale.py [--layers N] [--out benchmarks/results/refit_scale]

DeepSeek-V3 (transformers' own configuration, 671 billion parameters, bf16, on meta) is trained on 256 ranks:
FSDP2 along the first dimension, experts over 64 of them and then over the 4 that share each; or ZeRO-3. It
is served by 64 workers, 8 copies of 8 tensor parallel ranks, whose loader cuts and fuses as vLLM's for this
model does. What a trainer rank writes and what a worker reads are worked out by the code of a push; the
messages are the intersections of the two.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerostart.geometry import Box
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition, replicated
from zerostart.geometry.layout.layout import LocalBox
from zerostart.models import library_of
from zerostart.recipe import Recipe, SymbolicTensor, Target, symbols_of, trace_loader
from zerostart.recipe.inverse import inverted
from zerostart.state.refitting.image import Image
from zerostart.transfer.planning import Destination, PlanOptions, join
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.planning.writes import Origin, plan_writes

TRAINERS, EXPERT_PARALLEL, TENSOR_PARALLEL, COPIES = 256, 64, 8, 8
MiB = 1 << 20
CHUNK = 8 * MiB
#: Bytes of a message of the transports that send any.
MESSAGE = 32 * MiB
BF16 = torch.bfloat16


def trained(layers: int) -> tuple[Any, dict[str, Recipe], Image]:
    """The model on meta, what its parameters are in the image, and the image."""
    import transformers

    config = transformers.DeepseekV3Config(num_hidden_layers=layers, dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config).to(BF16)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    symbols = {name: SymbolicTensor.of(name, shape, BF16) for name, shape in shapes.items()}
    made = library_of(model).revert(model, dict(symbols))
    files = {
        name: (tuple(t.shape), t.value.pieces) for name, t in made.items() if isinstance(t, SymbolicTensor)
    }
    back = inverted(files, shapes)
    recipes = {n: Recipe(Target(n, shapes[n], BF16), pieces) for n, pieces in back.items()}
    assert recipes.keys() == shapes.keys(), "every tensor of the model has a place in the image"
    return config, recipes, Image.of((name, "BF16", shape) for name, (shape, _) in files.items())


def fsdp2(name: str, shape: tuple[int, ...], rank: int) -> Layout:
    """Experts over 64 ranks and each four that share them; all else over all ranks."""
    if ".experts." not in name:
        return dimension_shard(shape, 0, rank, TRAINERS)
    sharing = TRAINERS // EXPERT_PARALLEL
    each = shape[0] // EXPERT_PARALLEL
    mine = dimension_shard((each, *shape[1:]), 0, rank % sharing, sharing)
    first = rank // sharing * each
    boxes = tuple(
        LocalBox(Box((first + b.box.origin[0], *b.box.origin[1:]), b.box.extent), b.to, b.strides)
        for b in mine.boxes
    )
    return Layout(shape, mine.numel, mine.owned, boxes)


def zero3(name: str, shape: tuple[int, ...], rank: int) -> Layout:
    """A run of each parameter's elements."""
    return flat_partition(shape, rank, TRAINERS)


class Engine:
    """The parameters of one tensor parallel rank, and a loader with vLLM's rules for this model."""

    def __init__(self, config: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        c, t = config, size
        self.tensors: dict[str, torch.Tensor] = {}
        self._add("model.embed_tokens.weight", c.vocab_size // t, c.hidden_size)
        self._add("lm_head.weight", c.vocab_size // t, c.hidden_size)
        self._add("model.norm.weight", c.hidden_size)
        for number in range(c.num_hidden_layers):
            at = f"model.layers.{number}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._add(f"{at}.{norm}.weight", c.hidden_size)
            heads, a = c.num_attention_heads // t, f"{at}.self_attn"
            lora, rope = c.kv_lora_rank + c.qk_rope_head_dim, c.qk_nope_head_dim + c.qk_rope_head_dim
            self._add(f"{a}.fused_qkv_a_proj.weight", c.q_lora_rank + lora, c.hidden_size)
            self._add(f"{a}.q_a_layernorm.weight", c.q_lora_rank)
            self._add(f"{a}.kv_a_layernorm.weight", c.kv_lora_rank)
            self._add(f"{a}.q_b_proj.weight", heads * rope, c.q_lora_rank)
            self._add(f"{a}.kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
            self._add(f"{a}.o_proj.weight", c.hidden_size, heads * c.v_head_dim)
            if number < c.first_k_dense_replace:
                self._mlp(f"{at}.mlp", c.hidden_size, c.intermediate_size // t)
                continue
            inner = c.moe_intermediate_size // t
            self._mlp(f"{at}.mlp.shared_experts", c.hidden_size, inner * c.n_shared_experts)
            self._add(f"{at}.mlp.gate.weight", c.n_routed_experts, c.hidden_size)
            self._add(f"{at}.mlp.gate.e_score_correction_bias", c.n_routed_experts)
            self._add(f"{at}.mlp.experts.w13_weight", c.n_routed_experts, 2 * inner, c.hidden_size)
            self._add(f"{at}.mlp.experts.w2_weight", c.n_routed_experts, c.hidden_size, inner)

    def _add(self, name: str, *shape: int) -> None:
        self.tensors[name] = torch.empty(shape, dtype=BF16, device="meta")

    def _mlp(self, name: str, hidden: int, inner: int) -> None:
        self._add(f"{name}.gate_up_proj.weight", 2 * inner, hidden)
        self._add(f"{name}.down_proj.weight", hidden, inner)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor's part of this rank into its place."""
        for name, weight in pairs:
            self._load(name, weight)

    def _load(self, name: str, weight: torch.Tensor) -> None:
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        if ".experts." in name:
            layer, _, number = stem.rpartition(".")
            slot = self.tensors[f"{layer}.w2_weight" if leaf == "down_proj" else f"{layer}.w13_weight"].data
            self._part(slot[int(number)], leaf, weight)
        elif leaf in ("gate_proj", "up_proj"):
            self._part(self.tensors[f"{stem}.gate_up_proj.weight"].data, leaf, weight)
        elif leaf in ("q_a_proj", "kv_a_proj_with_mqa"):
            into = self.tensors[f"{stem}.fused_qkv_a_proj.weight"].data
            rows = weight.shape[0]
            into.narrow(0, 0 if leaf == "q_a_proj" else into.shape[0] - rows, rows).copy_(weight)
        elif leaf in ("down_proj", "o_proj"):
            self._part(self.tensors[name].data, "down_proj", weight)
        elif leaf in ("q_b_proj", "kv_b_proj", "embed_tokens", "lm_head"):
            into = self.tensors[name].data
            into.copy_(weight.narrow(0, self.rank * into.shape[0], into.shape[0]))
        else:
            self.tensors[name].data.copy_(weight)

    def _part(self, into: torch.Tensor, leaf: str, weight: torch.Tensor) -> None:
        if leaf == "down_proj":
            into.copy_(weight.narrow(1, self.rank * into.shape[1], into.shape[1]))
            return
        half = into.shape[0] // 2
        part = weight.narrow(0, self.rank * half, half)
        into.narrow(0, 0 if leaf == "gate_proj" else half, half).copy_(part)


def wanted(image: Image, engine: Engine) -> tuple[Runs, dict[str, float]]:
    """The bytes of the image that a worker takes, and the seconds of its plan."""
    begun = time.perf_counter()
    catalog = image.catalog()
    recipes = trace_loader(engine.load_weights, symbols_of(catalog), engine.tensors, "the engine")
    traced = time.perf_counter()
    assert not recipes.coverage.missing
    assert not recipes.partial
    items = [
        (recipe, replicated(recipe.target.shape), Destination(name, 0, 0, BF16, True))
        for name, recipe in recipes.by_name.items()
    ]
    plan = join(catalog, items, PlanOptions(chunk_size=CHUNK, gap_share=0.0))
    joined = time.perf_counter()
    runs = Runs.of_reads(plan)
    ended = time.perf_counter()
    assert runs.nbytes == sum(t.numel() * 2 for t in engine.tensors.values())
    return runs, {"trace": traced - begun, "join": joined - traced, "runs": ended - joined}


def owned(
    image: Image, recipes: Mapping[str, Recipe], rank: int, place: Callable[..., Layout]
) -> tuple[Runs, float]:
    """The bytes of the image that a trainer rank has, and the seconds of its plan."""
    begun = time.perf_counter()

    def shares() -> Iterator[tuple[Recipe, Layout, Origin]]:
        for name, recipe in recipes.items():
            layout = place(name, recipe.target.shape, rank)
            if layout.boxes:
                yield recipe, layout, Origin(name, BF16, True)

    plan = plan_writes(image.layout, shares(), CHUNK)
    return Runs.of_writes(plan, image.layout), time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument(
        "--trainers",
        type=int,
        nargs=2,
        default=(TRAINERS, 64),
        help="ranks that are planned: FSDP2, ZeRO-3; 0: none",
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    begun = time.perf_counter()
    config, recipes, image = trained(chosen.layers)
    found: dict[str, Any] = {
        "parameters": sum(torch.Size(shape).numel() for _, _, shape in image.entries),
        "tensors": len(image.entries),
        "image_bytes": image.nbytes,
        "image_seconds": time.perf_counter() - begun,
        "layers": chosen.layers,
    }
    print(found, flush=True)
    workers: list[Runs] = []
    seconds: list[dict[str, float]] = []
    for rank in range(TENSOR_PARALLEL):
        runs, took = wanted(image, Engine(config, rank, TENSOR_PARALLEL))
        workers.append(runs)
        seconds.append(took)
        print("worker", rank, runs.nbytes, len(runs.rows), took, flush=True)
    found["worker"] = {
        "seconds": {key: max(one[key] for one in seconds) for key in seconds[0]},
        "bytes": max(runs.nbytes for runs in workers),
        "rows": max(len(runs.rows) for runs in workers),
        "told_bytes": max(len(runs.to_bytes()) for runs in workers),
    }
    for (name, place), count in zip((("fsdp2", fsdp2), ("zero3", zero3)), chosen.trainers, strict=True):
        if count:
            found[name] = messages(image, recipes, place, workers, count)
            print(name, found[name], flush=True)
    if chosen.out is not None:
        chosen.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        chosen.out.with_suffix(".md").write_text(page(found))


def messages(
    image: Image, recipes: Mapping[str, Recipe], place: Callable[..., Layout], workers: list[Runs], count: int
) -> dict[str, Any]:
    """What ``count`` of the trainer ranks, evenly chosen, send; to each copy of a worker the same."""
    planning, meeting, sent, kinds, largest, own = [], [], [], [], [], []
    for rank in range(0, TRAINERS, TRAINERS // count):
        runs, took = owned(image, recipes, rank, place)
        planning.append(took)
        own.append(runs.nbytes)
        begun = time.perf_counter()
        pairs = [runs.intersect(worker) for worker in workers]
        meeting.append(time.perf_counter() - begun)
        nbytes = [pair.nbytes for pair in pairs]
        sent.append(COPIES * sum(nbytes))
        kinds.append(COPIES * sum(-(-n // MESSAGE) for n in nbytes))
        largest.append(min(MESSAGE, max(nbytes)))
    total = COPIES * sum(worker.nbytes for worker in workers)
    return {
        "ranks_planned": count,
        "seconds_plan": max(planning),
        "seconds_meet": max(meeting),
        "messages": max(kinds),
        "messages_mean": sum(kinds) / len(kinds),
        "largest_buffer": max(largest),
        "own_bytes": max(own),
        "sent_bytes": sum(sent),
        "wanted_bytes": total,
        "sent_to_wanted": sum(sent) / total if count == TRAINERS else None,
    }


def page(found: Mapping[str, Any]) -> str:
    """The result in words."""
    worker = found["worker"]
    took, parts = worker["seconds"], TENSOR_PARALLEL
    lines = [
        "# Refit at scale, rehearsed",
        "",
        "`python benchmarks/refit_scale.py`: plans alone, of one process on a CPU. DeepSeek-V3,",
        f"{found['parameters'] / 1e9:.0f} billion parameters in {found['tensors']} tensors",
        f"({found['image_bytes'] / 1e9:.0f} GB in bf16, {found['layers']} layers), from {TRAINERS} ranks",
        f"to {parts * COPIES} workers (tensor parallel {parts}, {COPIES} copies).",
        "The engine's loader has vLLM's rules for this model.",
        "",
        f"A worker's plan: {took['trace']:.1f} s to trace its loader, {took['join']:.1f} s to join,",
        f"{took['runs']:.1f} s for its {worker['rows']} rows of runs",
        f"({worker['told_bytes'] / 1e6:.1f} MB to tell); {worker['bytes'] / 1e9:.1f} GB of the image.",
        "Once for each refit, not for each push.",
        "",
        "| trainer | ranks planned | plan of a rank | its meetings with all workers "
        "| messages a rank, at most | mean | largest buffer | bytes sent / wanted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    known_as = {"fsdp2": f"FSDP2, experts over {EXPERT_PARALLEL}", "zero3": "ZeRO-3"}
    for name, words in known_as.items():
        row = found.get(name)
        if row is None:
            continue
        ratio = "-" if row["sent_to_wanted"] is None else f"{row['sent_to_wanted']:.6f}"
        cells = [
            *(words, row["ranks_planned"], f"{row['seconds_plan']:.2f} s", f"{row['seconds_meet']:.2f} s"),
            *(
                row["messages"],
                f"{row['messages_mean']:.0f}",
                f"{row['largest_buffer'] / MiB:.0f} MiB",
                ratio,
            ),
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    lines += [
        "",
        "*Messages* are of at most 32 MiB. *Wanted* is what all workers hold, each its own part once.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
