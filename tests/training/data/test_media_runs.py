"""Runs on pictures of two shapes: the same losses however ranks divide a step, and resumed."""

import json
import multiprocessing

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.ranks import run_ranks
from tests.training.data.media_files import CHINA, FLOWER
from zerostart.training import Task
from zerostart.training.config.load import parse_config
from zerostart.training.data.items import read_media


class Colors(nn.Module):
    """From the mean colour of a picture to that of its upper half."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, pixels):
        return self.outer(torch.tanh(self.inner(pixels.mean((2, 3)))))


def stacked(items):
    return {"pixels": torch.stack([item["image"] for item in items]) / 127.5 - 1}


class Halves(Task):
    """A task of a user, on the pictures themselves."""

    sections = needs = frozenset({"media"})
    examples = "pictures"

    def open(self):
        pass

    def items(self, world):
        return read_media(self.config.media, world)

    def builder(self):
        return Colors

    def collator(self, seed):
        return stacked

    def seen(self, batch):
        return len(batch["pixels"])

    def loss(self, model, batch):
        pixels = batch["pixels"]
        return nn.functional.mse_loss(model(pixels), pixels[:, :, : pixels.shape[2] // 2].mean((2, 3)))


def run(values, keys):
    from zerostart.training.loop.runner import train

    multiprocessing.current_process()._config["daemon"] = False  # the ranks of a launcher may have children
    for key, value in keys.items():
        section, _, leaf = key.rpartition(".")
        if section:
            values[section] = {**values[section], leaf: value}
        else:
            values[leaf] = value
    return train(parse_config(values)).steps


def losses(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture
def values(tmp_path):
    torch.manual_seed(0)
    save_file(Colors().state_dict(), tmp_path / "model.safetensors")
    data = tmp_path / "data"
    data.mkdir()
    with Image.open(CHINA) as china, Image.open(FLOWER) as flower:
        for number in range(15):
            wide = number % 3 > 0
            picture = (china if number % 2 else flower).crop((10 * number, 7 * number, 400, 300))
            picture.resize((48, 32) if wide else (32, 48)).save(data / f"{number:02d}.png")
    return {
        "model": {"source": str(tmp_path / "model.safetensors")},
        "task": {"name": f"{__name__}:Halves"},
        "media": {"source": str(data), "prompt": None},
        "engine": {"name": "fsdp2", "zero_stage": 3},
        "train": {"steps": 7, "batch_size": 2, "accumulation": 1, "learning_rate": 0.01},
        "checkpoint": {"every": 2, "keep": 9},
        "output": {"directory": str(tmp_path / "out")},
    }


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_ranks_and_resuming_do_not_change_what_a_step_sees(values, tmp_path, engine):
    values["engine"]["name"] = engine

    def started(name, ranks, **keys):
        out = tmp_path / name
        keys = {"output.directory": str(out), "train.accumulation": 2 // ranks, **keys}
        assert run_ranks(run, ranks, values, keys) == [keys.get("train.steps", 7)] * ranks
        return losses(out)

    alone = started("alone", 1)
    assert len(alone) == 7
    assert started("pair", 2, **{"media.workers": 1}) == pytest.approx(alone, rel=1e-5)
    # Three steps make an epoch: from within one, and from its end.
    for step in (4, 6):
        checkpoint = tmp_path / "alone" / "checkpoints" / f"step-{step:08d}"
        assert checkpoint.is_dir()
        later = started(f"later{step}", 2, resume=str(checkpoint))
        assert later == pytest.approx({at: alone[at] for at in range(step + 1, 8)}, rel=1e-5)
