"""DiffSynth-Studio's training scripts, from a checkout, on small pipelines: how they are called."""

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

from tests.diffusion.oracle import BESIDE
from tests.diffusion.small_pipelines import paths_of
from tests.integrations.launching import launch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Where DiffSynth-Studio is checked out.
CHECKOUT = "ZEROSTART_DIFFSYNTH"


@dataclass(frozen=True)
class Family:
    """One script: its options for tokenizers, and what DiffSynth's own command files give its LoRA."""

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
FAMILIES: Mapping[str, Family] = {
    "wanvideo": Family({"--tokenizer_path": "t5"}, "q,k,v,o,ffn.0,ffn.2", video=True),
    "qwen_image": Family({"--tokenizer_path": "qwen", "--processor_path": "qwen_vl"}, _QWEN_TARGETS),
    "flux": Family(
        {"--tokenizer_1_path": "clip", "--tokenizer_2_path": "t5"},
        _FLUX_TARGETS,
        lora=("--align_to_opensource_format",),
    ),
    "flux2": Family({"--tokenizer_path": "qwen"}, _FLUX2_TARGETS),
    "z_image": Family({"--tokenizer_path": "qwen"}, "to_q,to_k,to_v,to_out.0,w1,w2,w3"),
}


@dataclass(frozen=True)
class Route:
    """What is launched, and with which of DiffSynth's configurations (below ``examples``).

    Or with a configuration of DeepSpeed's own; None: without any.
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
    "zero3 exact alone": Route(_EXACT, processes=1),
    "stock plain": Route(None, None, 1),
}


@dataclass(frozen=True)
class Run:
    """What a script left: losses of rank 0, and files in a folder."""

    output: str
    folder: Path
    losses: list[float]

    def saved(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name)


def write_data(folder: Path) -> None:
    """Four pictures and four clips of five frames, with their table."""
    from PIL import Image

    draw = random.Random(0)

    def picture() -> Image.Image:
        return Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3))

    folder.mkdir(parents=True)
    for kind in ("image", "video"):
        rows = []
        for number in range(4):
            name = f"{kind}-{number}.{'png' if kind == 'image' else 'gif'}"
            frames = [picture() for _ in range(1 if kind == "image" else 5)]
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
    made: Path,
    out: Path,
    *,
    cache: Path | None = None,
    parts: Sequence[str] | None = None,
    timeout: float = 280,
) -> Run:
    """Run the script of ``family`` in ``out``, on the models and data in ``made``.

    ``cache`` is what an earlier stage left, in the place of pictures; ``parts`` the models that are loaded,
    all by default. Raises AssertionError if it fails.
    """
    chosen, checkout = ROUTES[route], Path(os.environ[CHECKOUT])
    paths = paths_of(family, made)
    options = [
        *(
            "--model_paths",
            json.dumps([str(path) for name, path in paths.items() if name in (parts or paths)]),
        ),
        *(item for flag, name in FAMILIES[family].tokenizers.items() for item in (flag, str(made / name))),
        *("--dataset_base_path", str(cache or made / "data"), "--output_path", str(out / "out")),
        *("--height", "32", "--width", "32", "--learning_rate", "5e-3", "--lora_rank", "4"),
        *("--customized_optimizer", "tests.diffusion.script_optimizer.AdamW", "--enable_csv_log"),
    ]
    kind = "video" if FAMILIES[family].video else "image"
    options += [] if cache else ["--dataset_metadata_path", str(made / "data" / f"{kind}.csv")]
    options += ["--num_frames", "5"] if kind == "video" else []
    out.mkdir(parents=True)
    # Their configurations name other files from the checkout's root on.
    (out / "examples").symlink_to(checkout / "examples")
    config = _config(chosen, family, out)
    arguments = [*options, *arguments]
    script = checkout / "examples" / family / "model_training" / "train.py"
    environment = {
        "ZEROSTART_ROWS": str(made / "rows.json"),
        "DIFFSYNTH_SKIP_DOWNLOAD": "True",
        **({} if chosen.module else {"ZEROSTART_REHEARSAL": "1"}),
    }
    output = launch(
        script.read_text(),
        out,
        config,
        arguments,
        [HERE / "scripts", ROOT, *([BESIDE] if BESIDE.is_dir() else [])],
        environment,
        timeout,
        chosen.processes,
        chosen.module,
        options=(),
    )
    return Run(output, out / "out", _losses(out / "out" / "loss.csv"))


def _config(route: Route, family: str, out: Path) -> Path:
    if isinstance(route.config, str):
        return out / "examples" / route.config.format(family=family)
    made = out / "accelerate.yaml"
    if route.config is None:
        # What accelerate does without a configuration.
        made.write_text("distributed_type: 'NO'\nmixed_precision: 'no'\nnum_machines: 1\nuse_cpu: true\n")
        return made
    (out / "deepspeed.json").write_text(json.dumps(route.config))
    lines = ["distributed_type: DEEPSPEED", "num_machines: 1", "deepspeed_config:", "  zero3_init_flag: true"]
    made.write_text("\n".join([*lines, f"  deepspeed_config_file: {out / 'deepspeed.json'}", ""]))
    return made


def _losses(table: Path) -> list[float]:
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return [float(row["value"]) for row in csv.DictReader(file)]
