"""vLLM's own loaders, traced, against the same loaders run on element numbers: a table over its model files.

    python -m tests.serving.vllm_table [--out docs/serving-models.md] [ARCHITECTURE ...]

Run in an environment that has vLLM beside zerostart (its CPU build will do). Each decoder model that vLLM
registers under the name of a transformers class is built small; its loader then gets the checkpoint's names
with symbolic tensors, and once more with element numbers, which is vLLM's own load. Tensor and expert
parallel ranks are those of one process that says it is one of two.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from zerostart import geometry
from zerostart.errors import ZerostartError
from zerostart.models import synth
from zerostart.recipe import Computed, Recipes, SymbolicTensor
from zerostart.refit.loaders import trace_loader

#: (tensor parallel, rank, expert parallel), each of one process.
PLACES = ((1, 0, False), (2, 0, False), (2, 1, False), (2, 1, True))
#: Heads of a size that vLLM's attention has, whatever else is small.
SIZES = (
    {"head_dim": 32},
    {"hidden_size": 128},
    {"hidden_size": 128, "head_dim": 32},
    {"num_attention_heads": 2},
)
#: What the hub's configurations say beside what transformers' class has a default for.
ALSO: Mapping[str, Mapping[str, object]] = {
    "AXK1ForCausalLM": {"first_k_dense_replace": 1},
    "AfmoeForCausalLM": {"num_attention_heads": 4, "num_key_value_heads": 2},
    # As on the hub: the head is the embedding.
    "BloomForCausalLM": {"tie_word_embeddings": True},
    "Gemma2ForCausalLM": {"tie_word_embeddings": True},
    "Gemma3nForCausalLM": {"tie_word_embeddings": True},
    # Transformers and vLLM have names of their own for a size; where they differ, vLLM asserts in its load.
    "Lfm2ForCausalLM": {
        "hidden_size": 128,
        "block_dim": 128,
        "intermediate_size": 384,
        "block_ff_dim": 384,
        "block_auto_adjust_ff_dim": True,
    },
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "FalconForCausalLM": {"ffn_hidden_size": 256},
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1},
}


@dataclass(frozen=True)
class Row:
    """What came of one model in one place."""

    architecture: str
    place: str
    outcome: str
    tensors: int = 0
    parameters: int = 0
    computed: int = 0
    partial: int = 0
    seconds: float = 0.0


def evaluated(
    pieces: Sequence[geometry.Piece], out: torch.Tensor, sources: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """``out``, contiguous, with what ``pieces`` fill of it."""
    shape = tuple(out.shape)
    flat, box = out.view(-1), geometry.Box((0,) * len(shape), shape)
    for piece in pieces:
        for part in geometry.copies_between(piece, box, 0, geometry.row_major_strides(shape)):
            source = part.source
            given = _computed(source, sources) if isinstance(source, Computed) else sources[str(source)]
            sizes = [size for size, _, _ in part.loops]
            values = given.reshape(-1).as_strided(sizes, [s for _, s, _ in part.loops], part.start)
            flat.as_strided(sizes, [d for _, _, d in part.loops], part.to).copy_(values)
    return out


def _computed(source: Computed, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    operands = [
        evaluated(one.pieces, torch.empty(one.shape, dtype=one.dtype), sources) for one in source.operands
    ]
    whole = geometry.Box((0,) * len(source.shape), source.shape)
    return source.evaluate(operands, whole, [(size,) for size in source.shape])


def configurations(architecture: str) -> Iterator[Any]:
    """Small configurations of the transformers class of that name."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kinds = [kind for kind, name in names.items() if name == architecture]
    if not kinds:
        raise LookupError("transformers has no class of this name")
    raw = synth._resized(synth._default_fields(kinds[0]), "tiny")
    for changes in SIZES:
        fields = {**raw, **{k: v for k, v in changes.items() if raw.get(k) is not None}}
        fields |= {"architectures": [architecture], **ALSO.get(architecture, {})}
        with contextlib.suppress(ZerostartError):
            yield synth._configuration(fields, architecture)


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint that ``save`` writes for a model of this configuration."""
    layout, _ = synth._plan(synth._model_class(config), config, torch.float32, "5GB")
    return {name: tuple(entry.shape) for name, entry in layout.tensors.items()}


@contextlib.contextmanager
def pretended(config: Any, size: int, rank: int, experts: bool) -> Iterator[None]:
    """Inside, this process says that it is ``rank`` of ``size``; no message is ever sent."""
    from vllm.distributed import parallel_state as state

    groups = [state.get_tp_group(), *([state.get_ep_group()] if experts and state._EP is not None else [])]
    before = [(group, group.world_size, group.rank_in_group) for group in groups]
    for group in groups:
        group.world_size, group.rank_in_group = size, rank
    config.parallel_config.tensor_parallel_size = size
    config.parallel_config.enable_expert_parallel = experts
    try:
        yield
    finally:
        for group, world_size, rank_in_group in before:
            group.world_size, group.rank_in_group = world_size, rank_in_group


def built(config: Any) -> Any:
    """vLLM's model, on the CPU, with whatever was in memory for weights."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(config)
    config.compilation_config = copy.deepcopy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return initialize_model(config)
    finally:
        torch.set_default_dtype(before)


def compare(model: Any, shapes: Mapping[str, tuple[int, ...]], known_as: str) -> tuple[Recipes, str, float]:
    """Trace the loader, run it on element numbers, and say whether both agree."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: t.detach().clone() for name, t in own.items()}
    symbols = {name: SymbolicTensor.of(name, shape, torch.float32) for name, shape in shapes.items()}
    start = time.monotonic()
    recipes = trace_loader(model.load_weights, symbols, own, known_as)
    seconds = time.monotonic() - start
    for name, t in own.items():
        if not torch.equal(t.detach().view(-1).nan_to_num(), before[name].view(-1).nan_to_num()):
            return recipes, f"the trace changed {name}", seconds
    sources, at = {}, 1
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        sources[name] = torch.arange(at, at + numel, dtype=torch.float32).view(shape)
        at += numel
    if at >= 1 << 24:
        return recipes, "has more elements than fp32 has whole numbers", seconds
    with torch.no_grad():
        for name in own:
            if own[name].is_floating_point():
                own[name].data.fill_(-1)
                before[name].fill_(-1)
    model.load_weights(iter([(name, t.clone()) for name, t in sources.items()]))
    for name, t in own.items():
        recipe = recipes.by_name.get(name)
        want = before[name].clone(memory_format=torch.contiguous_format)
        have = want if recipe is None else evaluated(recipe.pieces, want, sources)
        if not torch.equal(have.nan_to_num(7.5), t.detach().nan_to_num(7.5)):
            return recipes, f"{name} differs", seconds
    return recipes, "equal", seconds


def rows_of(architecture: str) -> Iterator[Row]:
    """The model in each place, or why it is not there."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    reason = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            candidates = list(configurations(architecture))
        except Exception as error:
            yield Row(architecture, "", f"not built: {_line(error)}")
            return
        for config in candidates:
            done = 0
            try:
                shapes = shapes_of(config)
                config.save_pretrained(folder)
            except Exception as error:
                reason = reason or f"not built by transformers: {_line(error)}"
                continue
            for size, rank, experts in PLACES:
                if experts and "expert" not in " ".join(shapes):
                    continue
                place = f"EP {size}" if experts else f"TP {size}" if size > 1 else "1"
                try:
                    engine = EngineArgs(
                        model=folder,
                        dtype="float32",
                        enforce_eager=True,
                        max_model_len=64,
                        skip_tokenizer_init=True,
                        load_format="dummy",
                    ).create_engine_config()
                    with set_current_vllm_config(engine), pretended(engine, size, rank, experts):
                        model = built(engine)
                        done += 1
                        try:
                            recipes, outcome, seconds = compare(model, shapes, architecture)
                        except ZerostartError as error:
                            yield Row(architecture, f"{place}, rank {rank}", f"refused: {_line(error)}")
                            continue
                        yield Row(
                            architecture,
                            f"{place}, rank {rank}",
                            outcome,
                            len(shapes),
                            len(recipes.by_name),
                            len(recipes.computed),
                            len(recipes.partial),
                            round(seconds, 3),
                        )
                except Exception as error:
                    failure = f"not built by vLLM: {_line(error)}"
                    if not done:
                        reason = reason or failure
                        break
                    yield Row(architecture, f"{place}, rank {rank}", failure)
            if done:
                return
    yield Row(architecture, "", reason or "not built: no small configuration")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split("See https://")[0].split())
    return f"{type(error).__name__}: {text[:240]}".replace("|", "/")


def started() -> None:
    """vLLM's groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    os.environ["VLLM_DIST_IDENT"] = f"table{os.getpid()}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)


def page(rows: Sequence[Row], version: str) -> str:
    """The table as a page of the documentation."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.architecture, []).append(row)
    tried = {name: found for name, found in by_model.items() if not found[0].outcome.startswith("not built")}
    good = [name for name, found in tried.items() if found[0].outcome == "equal"]
    checked = [row for row in rows if row.outcome == "equal"]
    lines = [
        "# Models of serving engines",
        "",
        f"What `make serving-models` found with vLLM {version}: its own `load_weights`, traced on the names",
        "of the checkpoint that `zerostart.save` writes, against the same call on element numbers. *Equal*",
        "says that each element of each parameter comes from the element that vLLM's own load takes it from.",
        "",
        f"{len(good)} of {len(tried)} models that could be built are equal on one rank, {len(checked)} of",
        f"{sum(len(found) for found in tried.values())} places (with tensor and expert parallel ranks). "
        f"{len(by_model) - len(tried)} were not built.",
        "",
        "| model | place | tensors | parameters | computed | filled in part | seconds | outcome |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(tried):
        for row in tried[name]:
            lines.append(
                f"| {name} | {row.place} | {row.tensors} | {row.parameters} | {row.computed} | {row.partial} "
                f"| {row.seconds} | {row.outcome} |"
            )
    lines += ["", "## Not built", "", "| model | why |", "|---|---|"]
    lines += [f"| {n} | {found[0].outcome} |" for n, found in sorted(by_model.items()) if n not in tried]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--rows", type=Path, help="a file of JSON lines; models that are in it are not run again"
    )
    parser.add_argument("architectures", nargs="*")
    chosen = parser.parse_args()
    import vllm
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    rows: list[Row] = []
    if chosen.rows is not None and chosen.rows.exists():
        rows = [Row(**json.loads(line)) for line in chosen.rows.read_text().splitlines()]
    known = {row.architecture for row in rows}
    started()
    for architecture in chosen.architectures or _TEXT_GENERATION_MODELS:
        if architecture in known:
            continue
        found = list(rows_of(architecture))
        rows += found
        for row in found:
            print(row, flush=True)
        if chosen.rows is not None:
            with chosen.rows.open("a") as file:
                file.writelines(json.dumps(vars(row)) + "\n" for row in found)
    if chosen.out is not None:
        chosen.out.write_text(page(rows, vllm.__version__))


if __name__ == "__main__":
    sys.exit(main())
