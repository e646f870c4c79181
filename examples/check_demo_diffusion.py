"""Look at what the demo has drawn, and draw with what it saved, in plain diffusers.

A classifier that has learnt from real digits says what the samples show, before the training and after. A
pipeline from the saved files alone, given the words and the noise, draws the last samples again.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.utils import logging
from PIL import Image
from torch.nn.functional import pad
from transformers.utils.logging import disable_progress_bar

import digits
from zerostart.training.config.load import load_config

LEAST = 0.8  # of the samples are recognised after the training
CLOSE = 2 / 255  # sums in another order


def main() -> int:
    config = load_config(sys.argv[1], sys.argv[2:])
    directory = Path(config.output.directory)
    prompts = config.samples.prompts * config.samples.count
    shown = np.array([[digits.caption(n) for n in range(10)].index(prompt) for prompt in prompts])
    folders = [directory / "samples" / f"step-{step:08d}" for step in (0, config.train.steps)]
    before, after = (torch.stack([digits.from_picture(p) for p in sorted(f.glob("*.png"))]) for f in folders)

    judge = digits.Judge()
    real, labels = digits.held_out()
    print(f"recognised of {len(real)} real digits, held out: {judge.share_recognised(real, labels):.0%}")
    recognised = [judge.share_recognised(pictures, shown) for pictures in (before, after)]
    print(f"recognised of {len(before)} samples before training: {recognised[0]:.0%}")
    print(f"recognised of {len(after)} samples after training:  {recognised[1]:.0%}")
    grid(before, after).save(directory.parent / "samples.png")
    print(f"the same noise and words before (left) and after: {directory.parent / 'samples.png'}")

    apart = float((drawn_again(directory, config.samples) - after[:10]).abs().max())
    print(f"plain diffusers draws the first ten from {directory}: at most {apart * 255:.0f} of 255 apart")
    if recognised[1] < LEAST or recognised[0] > 0.3 or apart > CLOSE:
        print("error: the model has not learnt, or the saved one is another", file=sys.stderr)
        return 1
    return 0


def drawn_again(directory: Path, samples) -> torch.Tensor:
    """The first ten samples, by plain diffusers from words and noise: [10, 3, 16, 16]."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bar()
    pipeline = FluxPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        samples.prompts[:10],
        negative_prompt=[samples.negative_prompt] * 10,
        true_cfg_scale=samples.guidance,
        num_inference_steps=samples.steps,
        height=samples.height,
        width=samples.width,
        generator=[torch.Generator().manual_seed(samples.seed + number) for number in range(10)],
        max_sequence_length=8,
        output_type="pt",
    ).images


def grid(*halves: torch.Tensor) -> Image.Image:
    """A hundred of each, ten in a row, side by side; in grey, and three times as large."""
    framed = [pad(half[:100].mean(1), (1, 1, 1, 1), value=0.5) for half in halves]  # [100, H, W]
    side = framed[0].shape[-1]
    squares = [f.view(10, 10, side, side).transpose(1, 2).reshape(10 * side, 10 * side) for f in framed]
    gap = torch.ones(10 * side, side // 2)
    picture = digits.to_picture(torch.cat([squares[0], gap, squares[1]], dim=1).expand(3, -1, -1)).convert(
        "L"
    )
    return picture.resize((3 * picture.width, 3 * picture.height), Image.Resampling.NEAREST)


if __name__ == "__main__":
    sys.exit(main())
