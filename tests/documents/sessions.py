"""Sessions: pages whose commands are run, with their files and models.

A session runs a page from top to bottom: it writes the files that the page shows (``# train.yaml`` in their
first line), and runs the commands and a tutorial's Python blocks. ``SUBSTITUTIONS`` are applied first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.documents.blocks import REPOSITORY

DRY_RUN = "--dry-run --quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check"
#: Text in commands and files, and its replacement when they are run.
SUBSTITUTIONS: Mapping[str, str] = {
    # Synopses.
    "zerostart config FAMILY OUT.yaml [--engine E] [--zero-stage S] [--lora]": (
        "zerostart config wan OUT.yaml --zero-stage 2 --lora"
    ),
    "CONFIG.yaml [KEY=VALUE ...] [--nproc N]": "CONFIG.yaml --nproc 1",
    # The package and the demo of this checkout, without downloads.
    "pip install .": f"pip install {DRY_RUN} {REPOSITORY}",
    'pip install ".[deepspeed]"': f"pip install {DRY_RUN} '{REPOSITORY}[deepspeed]'",
    "make demo": f"make -C {REPOSITORY} -o .venv/installed demo ENGINE=fsdp2 OUT=$PWD/demo",
    "make test": f"make -C {REPOSITORY} -o .venv/installed -n test",
    # The script of this test does not choose an engine.
    "torchrun --nproc-per-node 8 -m zerostart SCRIPT ARGS": (
        "torchrun --standalone --nproc-per-node 2 -m zerostart --engine fsdp2 SCRIPT"
    ),
    # Few ranks, for small machines.
    "torchrun --nproc-per-node 8": "torchrun --standalone --nproc-per-node 2",
    "--nproc 8": "--nproc 2",
    "num_processes: 8": "num_processes: 2",
    "--world-size 1024 --rank 700": "--world-size 4 --rank 3",
    # A precision that every processor supports.
    "mixed_precision: bf16": "mixed_precision: 'no'",
    # Two jobs on one machine cannot share a launcher's default port.
    "torchrun --nproc": "torchrun --standalone --nproc",
    "deepspeed --num_gpus 8": "DS_ACCELERATOR=cpu deepspeed --num_gpus 2 --master_port $((20000 + RANDOM))",
    "accelerate launch --config_file": "accelerate launch --main_process_port 0 --config_file",
    # The tiny model has five experts: at two a rank, a fourth rank would have none.
    "--expert-parallel 4": "--expert-parallel 2",
    # The tiny models take at most 64 tokens.
    "sequence_length: 128": "sequence_length: 32",
    "sequence_length: 512": "sequence_length: 32",
    # Small pictures, for two cores.
    "height: 512": "height: 16",
    "width: 512": "width: 16",
    'pipe("a flower in the mountains")': 'pipe("a flower", height=16, width=16, num_inference_steps=2)',
}

QWEN = {"Qwen/Qwen3-0.6B": "text:qwen3"}
MIXTURE = {"Qwen/Qwen3-30B-A3B": "text:qwen3_moe_aligned"}
TRAIN_CONFIG = """\
model: {source: CHECKPOINT}
task: {name: "tests.training.language:CausalLanguage", source: text.txt, sequence_length: 16}
train: {steps: 2, batch_size: 1}
output: {directory: trained, overwrite: true}
"""
TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
LOAD_SCRIPT = """\
import os
import torch.distributed as dist
from transformers import AutoModelForCausalLM
if "RANK" in os.environ:
    dist.init_process_group()
AutoModelForCausalLM.from_pretrained("CHECKPOINT")
"""
CACHE_CONFIG = """\
model: {source: path/Qwen-Image}
task: {name: flow-matching}
media: {source: pictures/metadata.csv, height: 16, width: 16}
cache: {directory: cache/pictures}
train: {steps: 1}
output: {directory: out}
"""
TRAINER_SCRIPT = """\
import sys
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
fixed = ["--max_steps", "1", "--save_strategy", "no", "--report_to", "none"]
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:] + fixed)
model = AutoModelForCausalLM.from_pretrained("CHECKPOINT")
rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 4
Trainer(model, arguments, train_dataset=rows).train()
"""
EXPERTS_SCRIPT = """\
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments
from transformers.distributed import DistributedConfig
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-30B-A3B", distributed_config=DistributedConfig(enable_expert_parallel=True)
)
"""
DEEPSPEED_CONFIG = """\
{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
"""
ZERO_THREE = """\
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3}
mixed_precision: "no"
num_processes: 2
"""


@dataclass(frozen=True)
class Session:
    """The run of one page.

    The page expects ``models`` (see ``folders.py``), ``files``, and the results of ``setup`` commands.
    Commands that begin with one of ``failing`` end with exit code 1. ``python``: run Python blocks, too.
    """

    page: str
    models: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    python: bool = False


def session_of(page: str) -> Session | None:
    return next((session for session in SESSIONS if session.page == page), None)


CHECKPOINT = {"CHECKPOINT": "text:qwen3", "A": "qwen3", "B": "qwen3"}
SAVE_COMMANDS = (
    "python -c \"import zerostart; zerostart.save(zerostart.load('CHECKPOINT', engine='fsdp2'), 'PATH')\"",
)
WRITE_ORIGINAL = """\
import torch
torch.manual_seed(0)
state = {}
for layer in range(2):
    for part in "qkvo":
        state[f"layers.{layer}.attention.w{part}.weight"] = torch.randn(64, 64) / 8
    for name in ("gamma", "beta"):
        state[f"layers.{layer}.norm.{name}"] = torch.randn(64)
torch.save(state, "original.pt")
"""
NODES = (REPOSITORY / "examples" / "roles" / "nodes.py").read_text(encoding="utf-8")
SESSIONS = (
    Session(
        "README.md",
        {"CHECKPOINT": "text:qwen3"},
        {"train.py": TRAINER_SCRIPT, "zero3.yaml": ZERO_THREE, "ds_zero3.json": DEEPSPEED_CONFIG},
    ),
    Session("docs/index.md", CHECKPOINT, {"train.py": TRAINER_SCRIPT, "ds_zero3.json": DEEPSPEED_CONFIG}),
    Session(
        "docs/adoption.md",
        CHECKPOINT,
        {"SCRIPT": LOAD_SCRIPT, "script.py": LOAD_SCRIPT, "zero3.yaml": ZERO_THREE},
    ),
    Session(
        "docs/cache.md",
        {"path/Qwen-Image": "pipeline:qwen_image", "pictures": "pictures:18"},
        {"CONFIG.yaml": CACHE_CONFIG},
        python=True,
    ),
    Session(
        "docs/flow-matching.md",
        CHECKPOINT,
        {"run.yaml": TRAIN_CONFIG, "text.txt": TEXT},
    ),
    Session("docs/examples.md", files={"nodes.py": NODES}),
    Session("docs/forecast.md", MIXTURE),
    Session("docs/why.md", MIXTURE),
    Session("docs/parallelism.md", MIXTURE),
    Session("docs/training.md", CHECKPOINT, {"CONFIG.yaml": TRAIN_CONFIG, "text.txt": TEXT}),
    Session("docs/saving.md", {**CHECKPOINT, **QWEN}, {}, SAVE_COMMANDS),
    Session(
        "docs/quickstart.md",
        QWEN,
        {"script.py": LOAD_SCRIPT.replace("CHECKPOINT", "Qwen/Qwen3-0.6B"), "zero3.yaml": ZERO_THREE},
        python=True,
    ),
    Session(
        "docs/tutorials/experts.md",
        MIXTURE,
        {"train.py": EXPERTS_SCRIPT, "ds_zero3.json": DEEPSPEED_CONFIG},
        python=True,
    ),
    Session("docs/tutorials/experts-lora.md", MIXTURE, python=True),
    Session(
        "docs/tutorials/existing-script.md",
        QWEN,
        {
            "train.py": TRAINER_SCRIPT.replace("CHECKPOINT", "Qwen/Qwen3-0.6B"),
            "ds_zero3.json": DEEPSPEED_CONFIG,
        },
        python=True,
    ),
    Session(
        "docs/tutorials/own-module.md",
        files={"write.py": WRITE_ORIGINAL},
        setup=("python write.py",),
        python=True,
    ),
    Session(
        "docs/tutorials/diffusion.md",
        {"Qwen/Qwen-Image": "pipeline:qwen_image", "pictures": "pictures:2"},
        python=True,
    ),
)
