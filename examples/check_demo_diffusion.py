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

import digits
from zerostart.training.config import load_config

LEAST = 0.8  # of the samples are recognised after the training
CLOSE = 2 / 255  # sums in another order


def main() -> int:
    config = load_config(sys.argv[1], sys.argv[2:])
    directory = Path(config.output.directory)
    prompts = config.samples.prompts * config.samples.count
    shown = np.array([[digits.caption(n) for n in range(10)].index(prompt) for prompt in prompts])
    folders = sorted((directory / "samples").iterdir())
    before, after = (
        torch.stack([digits.from_picture(p) for p in sorted(f.glob("*.png"))])
        for f in (folders[0], folders[-1])
    )

    judge = digits.Judge()
    real, labels = digits.held_out()
    print(f"recognised of {len(real)} real digits, held out: {judge.share_recognised(real, labels):.0%}")
    recognised = [judge.share_recognised(pictures, shown) for pictures in (before, after)]
    print(f"recognised of {len(before)} samples before training: {recognised[0]:.0%}")
    print(f"recognised of {len(after)} samples after training:  {recognised[1]:.0%}")
    picture = grid(before, after)
    picture.save(directory.parent / "samples.png")
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
    pipeline = FluxPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        samples.prompts[:10],
        num_inference_steps=samples.steps,
        height=samples.height,
        width=samples.width,
        generator=[torch.Generator().manual_seed(samples.seed + number) for number in range(10)],
        max_sequence_length=8,
        output_type="pt",
    ).images


def grid(*columns: torch.Tensor):
    """Ten rows of ten each, side by side, with a gap between."""
    squares = [c[:100].view(10, 10, 3, digits.SIZE, digits.SIZE).permute(2, 0, 3, 1, 4) for c in columns]
    flat = [s.reshape(3, 10 * digits.SIZE, 10 * digits.SIZE) for s in squares]
    gap = torch.ones(3, 10 * digits.SIZE, digits.SIZE // 2)
    return digits.to_picture(torch.cat([flat[0], gap, flat[1]], dim=2))


if __name__ == "__main__":
    sys.exit(main())
