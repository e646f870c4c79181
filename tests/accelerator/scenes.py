"""Functions for accelerator ranks: train existing scripts, and draw pictures."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests.accelerator.verbs import join, places


def run_script(
    path: Path, out: Path, library: str, environment: dict[str, str], adopt: dict[str, Any] | None
) -> dict[str, Any]:
    """Train with the Trainer or accelerate, and with zerostart unless ``adopt`` is None."""
    from tests.integrations import scripts

    torch.manual_seed(3)
    if library == "trainer":
        result = scripts.trainer_script(path, out, environment, {"ddp_backend": None}, adopt, {})
    else:
        adapter = library == "peft"
        result = scripts.accelerate_script(path, environment, adopt, "no", adapter=adapter, on_host=False)
    result.pop("report", None)
    return result


def compare_picture(path: Path, key: str, engine: str, stage: int, placement: dict[str, str]) -> float:
    """Return the relative error of a pipeline's picture against diffusers on the host."""
    import diffusers

    from tests.integrations.pipelines.tiny_pipelines import CALLS

    device = join(None, False)

    def picture(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        output = pipe(
            prompt="a cat sees the sea",
            num_inference_steps=2,
            output_type="pt",
            generator=generator,
            **CALLS[key],
        )
        return torch.as_tensor(output[0]).cpu()

    pipe = zerostart.load_pipeline(path, placement, engine, stage, progress=False)
    devices = {device_of_part for name in placement for _, device_of_part in places(getattr(pipe, name))}
    assert devices <= {device, torch.device("cpu")}, devices
    actual = picture(pipe)
    expected = picture(diffusers.DiffusionPipeline.from_pretrained(str(path)))
    dist.destroy_process_group()
    return float((actual - expected).abs().max() / expected.abs().max())
