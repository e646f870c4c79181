"""Run the script of transformers' pull request 45548 (experts with ZeRO-3) on CPU ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.integrations.launching import ANNOUNCED, CONFIGS, LINE, add_line, launch
from tests.parity import checkpoint
from tests.quantised import gpt_oss_mxfp4
from tests.ranks import run_ranks

#: The pull request's script. The test replaces its model, backend, devices and tokens.
SCRIPT = """
import os
import torch
import torch.distributed as dist
import deepspeed
from deepspeed import comm as ds_comm

from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.distributed.configuration_utils import DistributedConfig

local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])

dist.init_process_group("nccl")
torch.cuda.set_device(local_rank)

ds_config = {
    "train_batch_size": world_size,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
}
_dschf = HfDeepSpeedConfig(ds_config)  # strong ref; the global weakref dies if GC'd

mesh = dist.init_device_mesh("cuda", (world_size,))
model = AutoModelForCausalLM.from_pretrained(
    "openai/gpt-oss-20b",
    dtype=torch.bfloat16,
    distributed_config=DistributedConfig(enable_expert_parallel=True),
    device_mesh=mesh,
    attn_implementation="eager",
)
model = model.to(f"cuda:{local_rank}")

if dist.get_rank() == 0:
    w = model.model.layers[0].mlp.experts.gate_up_proj
    print(f"expert shape per rank (post-EP, pre-DS): {tuple(w.shape)}  (32 experts / EP=4 = 8)")

ds_comm.init_distributed("nccl")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)

x = torch.randint(0, 1000, (1, 8), device=f"cuda:{local_rank}")
out = engine(input_ids=x, labels=x.clone(), use_cache=False)
engine.backward(out.loss)
engine.step()

if dist.get_rank() == 0:
    print(f"loss={out.loss.item():.4f}")

dist.destroy_process_group()
"""
#: The released layout: 32 experts, as blocks and scales.
MXFP4 = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return {
        "stored": checkpoint("gpt_oss", folder, num_local_experts=32),
        "mxfp4": gpt_oss_mxfp4(folder / "mxfp4", MXFP4),
    }


def tokens(vocabulary: int) -> torch.Tensor:
    """Return one row of tokens for each of four ranks."""
    return torch.randint(3, vocabulary, (4, 8), generator=torch.Generator().manual_seed(1))


def train_in_one_process(path: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the whole batch in fp32."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    quantised = "quantization_config" in json.loads((path / "config.json").read_text())
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if quantised else {}
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options).float()
    x = tokens(stock.config.vocab_size)
    loss = stock(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in stock.named_parameters()}


def run_script(path: Path, out: Path, exact: bool) -> dict[str, Any]:
    """Make the script's calls; ``exact``: in fp32, and compare gradients."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    loss, expected = train_in_one_process(path) if exact else (0.0, {})
    rank, size = dist.get_rank(), dist.get_world_size()
    config = {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": not exact},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    }
    zero_config = HfDeepSpeedConfig(config)
    mesh = dist.init_device_mesh("cpu", (size,))
    with zerostart.enabled(progress=False):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            distributed_config=DistributedConfig(enable_expert_parallel=True),
            device_mesh=mesh,
            attn_implementation="eager",
        )
    del zero_config
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == experts.gate_up_proj.ds_shape[0] == 32 // size
    assert model.has_ep
    assert model.ep_plan["model.layers.*.mlp.experts.gate_up_proj"] == "grouped_gemm"
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config)
    assert (model.tp_plan, model.ep_plan) == (plain.tp_plan, plain.ep_plan)
    model.save_pretrained(out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = tokens(model.config.vocab_size).view(size, -1, 8)[rank]
    result = engine(input_ids=x, labels=x.clone(), use_cache=False)
    engine.backward(result.loss)
    lines = differing_gradients(model, expected, size)
    engine.step()
    mean = result.loss.detach().clone()
    dist.all_reduce(mean)
    return {
        "loss": mean.item() / size,
        "expected": loss,
        "differences": lines,
        "dequantised": zerostart.report(engine).dequantised,
        "report": str(zerostart.report(engine)),
    }


def differing_gradients(model: torch.nn.Module, expected: dict[str, torch.Tensor], experts: int) -> list[str]:
    from deepspeed.utils import groups, safe_get_full_grad

    lines = []
    for name, parameter in model.named_parameters():
        gradient = safe_get_full_grad(parameter).float().clone()
        if ".experts." in name:
            parts = [torch.empty_like(gradient) for _ in range(experts)]
            dist.all_gather(parts, gradient, group=groups._get_expert_parallel_group(f"ep_size_{experts}"))
            gradient = torch.cat(parts)
        if expected:
            reference = expected[name]
            error = (gradient - reference).abs().max() / reference.abs().max().clamp_min(1e-12)
            lines += [f"{name}: {error.item():.1e}"] if error > 1e-5 else []
        lines += [] if bool(gradient.isfinite().all()) else [f"{name} is not finite"]
    return lines


def run_both(sources: dict[str, Path], out: Path, exact: dict[str, bool]) -> dict[str, dict[str, Any]]:
    return {name: run_script(sources[name], out / name, exact[name]) for name in sources}


def check(ranks: list[dict[str, dict[str, Any]]], sources: dict[str, Path], out: Path) -> None:
    for name, path in sources.items():
        for result in (rank[name] for rank in ranks):
            assert result["differences"] == []
            assert result["loss"] == pytest.approx(result["expected"] or result["loss"], rel=1e-5)
            assert result["dequantised"] == ("mxfp4" if name == "mxfp4" else "")
            assert ("dequantised from mxfp4" in result["report"]) == (name == "mxfp4")
        written = json.loads((out / name / "config.json").read_text())
        stored = json.loads((path / "config.json").read_text())
        stored.pop("quantization_config", None)
        assert written == {**stored, "dtype": written["dtype"]}


def test_script_on_two_ranks(sources: dict[str, Path], tmp_path: Path) -> None:
    check(run_ranks(run_both, 2, sources, tmp_path, {"stored": True, "mxfp4": True}), sources, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False], ids=["fp32", "bf16"])
def test_script_on_four_ranks(exact: bool, sources: dict[str, Path], tmp_path: Path) -> None:
    check(run_ranks(run_both, 4, sources, tmp_path, dict.fromkeys(sources, exact)), sources, tmp_path)


def adapt_to_cpu(script: str, path: Path) -> str:
    """Replace the script's model, devices and backend for CPUs with gloo."""
    for accelerated, plain in (
        ('"nccl"', '"gloo"'),
        ("torch.cuda.set_device(local_rank)\n", ""),
        ('"cuda"', '"cpu"'),
        ('f"cuda:{local_rank}"', '"cpu"'),
        ("openai/gpt-oss-20b", str(path)),
        ("randint(0, 1000", "randint(0, 96"),
    ):
        assert accelerated in script
        script = script.replace(accelerated, plain)
    next_line, check = (
        "optimizer = torch.optim",
        "assert model.model.layers[0].mlp.experts.num_experts == 8\n",
    )
    return script.replace(next_line, check + next_line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stored", "mxfp4"])
def test_script_launched_on_four_ranks(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    script = add_line(adapt_to_cpu(SCRIPT, sources[name]), LINE)
    output = launch(script, tmp_path, CONFIGS["zero3"], [], processes=4)
    assert ANNOUNCED in output
    (loss,) = re.findall(r"^loss=(\S+)$", output, flags=re.MULTILINE)
    assert torch.tensor(float(loss)).isfinite()
