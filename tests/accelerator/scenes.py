"""What ranks on an accelerator do beside the verbs: share sequences, be adopted, draw pictures."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests.accelerator.verbs import join, places


def adopted(
    path: Path, out: Path, library: str, environment: dict[str, str], adopt: dict[str, Any] | None
) -> dict[str, Any]:
    """A script over the Trainer or accelerate; with ``adopt``, and the line that is added."""
    from tests.integrations import scripts

    torch.manual_seed(3)
    if library == "trainer":
        found = scripts.trainer_script(path, out, environment, {"ddp_backend": None}, adopt, {})
    else:
        adapter = library == "peft"
        found = scripts.accelerate_script(path, environment, adopt, "no", adapter=adapter, on_host=False)
    found.pop("report", None)
    return found


def drawn(path: Path, key: str, engine: str, stage: int, placement: dict[str, str]) -> float:
    """How far a pipeline's picture is from that of diffusers on the host."""
    import diffusers

    from tests.integrations.pipelines.tiny_pipelines import CALLS

    device = join(None, False)

    def picture(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        made = pipe(
            prompt="a cat sees the sea",
            num_inference_steps=2,
            output_type="pt",
            generator=generator,
            **CALLS[key],
        )
        return torch.as_tensor(made[0]).cpu()

    pipe = zerostart.load_pipeline(path, placement, engine, stage, progress=False)
    lying = {at for name in placement for _, at in places(getattr(pipe, name))}
    assert lying <= {device, torch.device("cpu")}, lying
    found = picture(pipe)
    wanted = picture(diffusers.DiffusionPipeline.from_pretrained(str(path)))
    dist.destroy_process_group()
    return float((found - wanted).abs().max() / wanted.abs().max())
