"""Run DiffSynth-Studio's training scripts from a checkout on small pipelines."""

import csv
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.diffusion.oracle import DIFFSYNTH_FOLDER
from tests.diffusion.small_pipelines import get_model_paths
from tests.integrations.launching import launch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
#: Environment variable with the path of a checkout of DiffSynth-Studio.
CHECKOUT_VARIABLE = "ZEROSTART_DIFFSYNTH"


@dataclass(frozen=True)
class Script:
    """One script: its tokenizer options and the LoRA options of DiffSynth's command files."""

    tokenizers: Mapping[str, str]
    targets: str
    video: bool = False
    lora: Sequence[str] = ()


_QWEN_TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,"
    "txt_mlp.net.2,txt_mod.1"
)
_FLUX_TARGETS = (
    "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear,norm1_a.linear,"
    "norm1_b.linear,to_qkv_mlp"
)
_FLUX2_TARGETS = (
    "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,linear_in,linear_out,"
    "to_qkv_mlp_proj,single_transformer_blocks.0.attn.to_out"
)
#: The targets are those of DiffSynth's own command files.
SCRIPTS: Mapping[str, Script] = {
    "wanvideo": Script({"--tokenizer_path": "t5"}, "q,k,v,o,ffn.0,ffn.2", video=True),
    "qwen_image": Script({"--tokenizer_path": "qwen", "--processor_path": "qwen_vl"}, _QWEN_TARGETS),
    "flux": Script(
        {"--tokenizer_1_path": "clip", "--tokenizer_2_path": "t5"},
        _FLUX_TARGETS,
        lora=("--align_to_opensource_format",),
    ),
    "flux2": Script({"--tokenizer_path": "qwen"}, _FLUX2_TARGETS),
    "z_image": Script({"--tokenizer_path": "qwen"}, "to_q,to_k,to_v,to_out.0,w1,w2,w3"),
}


@dataclass(frozen=True)
class Route:
    """Module to launch, its configuration, and the number of processes.

    ``config`` is a file of DiffSynth below ``examples``, a DeepSpeed configuration, or None.
    """

    config: str | Mapping[str, Any] | None
    module: str | None = "zerostart"
    processes: int = 2


_ZERO2 = "flux/model_training/full/accelerate_config.yaml"
_ZERO3 = "{family}/model_training/full/accelerate_config_zero3.yaml"
#: DeepSpeed's own linear function for ZeRO-3 adds biases after a rounding, which torch's does not.
_EXACT = {
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "memory_efficient_linear": False,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


ROUTES: Mapping[str, Route] = {
    "stock zero2": Route(_ZERO2, None),
    "stock zero3": Route(_ZERO3, None),
    "zero2": Route(_ZERO2),
    "zero3": Route(_ZERO3),
    "zero3 exact": Route(_EXACT),
    "zero3 exact single": Route(_EXACT, processes=1),
    "stock plain": Route(None, None, 1),
}


@dataclass(frozen=True)
class Run:
    """Output of a script: its log, the losses of rank 0, and its files."""

    output: str
    folder: Path
    losses: list[float]

    def load(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name)


def write_data(folder: Path) -> None:
    """Write four pictures and four clips of five frames, with their tables."""
    from PIL import Image

    rng = random.Random(0)

    def make_picture() -> Image.Image:
        return Image.frombytes("RGB", (32, 32), rng.randbytes(32 * 32 * 3))

    folder.mkdir(parents=True)
    for kind in ("image", "video"):
        rows = []
        for number in range(4):
            name = f"{kind}-{number}.{'png' if kind == 'image' else 'gif'}"
            frames = [make_picture() for _ in range(1 if kind == "image" else 5)]
            frames[0].save(
                folder / name, **({"save_all": True, "append_images": frames[1:]} if frames[1:] else {})
            )
            rows.append({kind: name, "prompt": f"number {number} of {kind}s"})
        with (folder / f"{kind}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[kind, "prompt"])
            writer.writeheader()
            writer.writerows(rows)


def run(
    family: str,
    route: str,
    arguments: Sequence[str],
    inputs: Path,
    out: Path,
    *,
    cache: Path | None = None,
    parts: Sequence[str] | None = None,
    timeout: float = 280,
) -> Run:
    """Run the script of ``family`` in ``out``, on the models and data in ``inputs``.

    ``cache`` is the output of an earlier stage, used instead of pictures; ``parts`` names the models to load,
    all by default. Raises AssertionError if the script fails.
    """
    launcher, checkout = ROUTES[route], Path(os.environ[CHECKOUT_VARIABLE])
    paths = get_model_paths(family, inputs)
    options = [
        *(
            "--model_paths",
            json.dumps([str(path) for name, path in paths.items() if name in (parts or paths)]),
        ),
        *(item for flag, name in SCRIPTS[family].tokenizers.items() for item in (flag, str(inputs / name))),
        *("--dataset_base_path", str(cache or inputs / "data"), "--output_path", str(out / "out")),
        *("--height", "32", "--width", "32", "--learning_rate", "5e-3", "--lora_rank", "4"),
        *("--customized_optimizer", "tests.diffusion.script_optimizer.AdamW", "--enable_csv_log"),
    ]
    kind = "video" if SCRIPTS[family].video else "image"
    options += [] if cache else ["--dataset_metadata_path", str(inputs / "data" / f"{kind}.csv")]
    options += ["--num_frames", "5"] if kind == "video" else []
    out.mkdir(parents=True)
    # The configurations name other files relative to the root of the checkout.
    (out / "examples").symlink_to(checkout / "examples")
    config = _write_config(launcher, family, out)
    arguments = [*options, *arguments]
    script = checkout / "examples" / family / "model_training" / "train.py"
    environment = {
        "ZEROSTART_ROWS": str(inputs / "rows.json"),
        "DIFFSYNTH_SKIP_DOWNLOAD": "True",
        **({} if launcher.module else {"ZEROSTART_REHEARSAL": "1"}),
    }
    output = launch(
        script.read_text(),
        out,
        config,
        arguments,
        [FOLDER / "scripts", ROOT, *([DIFFSYNTH_FOLDER] if DIFFSYNTH_FOLDER.is_dir() else [])],
        environment,
        timeout,
        launcher.processes,
        launcher.module,
        options=(),
    )
    return Run(output, out / "out", _read_losses(out / "out" / "loss.csv"))


def _write_config(route: Route, family: str, out: Path) -> Path:
    if isinstance(route.config, str):
        return out / "examples" / route.config.format(family=family)
    path = out / "accelerate.yaml"
    if route.config is None:
        # The defaults of accelerate.
        path.write_text("distributed_type: 'NO'\nmixed_precision: 'no'\nnum_machines: 1\nuse_cpu: true\n")
        return path
    (out / "deepspeed.json").write_text(json.dumps(route.config))
    lines = ["distributed_type: DEEPSPEED", "num_machines: 1", "deepspeed_config:", "  zero3_init_flag: true"]
    path.write_text("\n".join([*lines, f"  deepspeed_config_file: {out / 'deepspeed.json'}", ""]))
    return path


def _read_losses(table: Path) -> list[float]:
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return [float(row["value"]) for row in csv.DictReader(file)]
