"""scikit-learn's 1797 handwritten digits as pictures with captions, and a judge of what pictures show."""

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch.nn.functional import interpolate

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = 16
HELD_OUT = 360  # the last ones: for neither the models nor the judge to learn from


def caption(digit: int) -> str:
    return f"a handwritten {WORDS[digit]}"


def pictures() -> tuple[torch.Tensor, np.ndarray]:
    """The digits, 8 x 8 pixels made larger: [1797, 3, 16, 16] from 0 to 1, and which each is, [1797]."""
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / digits.images.max()
    large = interpolate(small, size=SIZE, mode="bicubic", align_corners=False).clamp(0, 1)
    return large.expand(-1, 3, -1, -1).contiguous(), digits.target


def to_learn_from() -> tuple[torch.Tensor, np.ndarray]:
    images, labels = pictures()
    return images[:-HELD_OUT], labels[:-HELD_OUT]


def held_out() -> tuple[torch.Tensor, np.ndarray]:
    images, labels = pictures()
    return images[-HELD_OUT:], labels[-HELD_OUT:]


def write_table(folder: Path) -> Path:
    """Write the pictures to learn from into ``folder``, and a table that says which file shows what."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = to_learn_from()
    table = folder / "metadata.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "prompt"])
        for number, (image, digit) in enumerate(zip(images, labels, strict=True)):
            to_picture(image).save(folder / f"{number:04d}.png")
            rows.writerow([f"{number:04d}.png", caption(int(digit))])
    return table


def to_picture(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


def from_picture(path: Path) -> torch.Tensor:
    return torch.tensor(np.asarray(Image.open(path).convert("RGB"))).permute(2, 0, 1) / 255


class Judge:
    """A support vector machine that has learnt from real digits alone."""

    def __init__(self) -> None:
        images, labels = to_learn_from()
        self._machine = SVC(C=10).fit(_features(images), labels)

    def share_recognised(self, images: torch.Tensor, digits: np.ndarray) -> float:
        """Of ``images``, [N, 3, 16, 16] from 0 to 1, the share that shows what it should, from 0 to 1."""
        return float(self._machine.score(_features(images), digits))


def _features(images: torch.Tensor) -> np.ndarray:
    return interpolate(images.mean(1, keepdim=True), size=8, mode="area").flatten(1).numpy()
