"""An engine that an installed package brings trains by ``zerostart train``, and as zerostart's own do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

from tests.tiny import minilm_path
from tests.training.language import MASKED

ZEROSTART = [sys.executable, "-c", "from zerostart.cli import main; main()"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What an installation of the outsider's package leaves on the path of modules."""
    info = tmp_path / "site" / "copies-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: copies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zerostart.engines]\ncopies = tests.extending.copies:Copies\n")
    return info.parent


def trained(folder: Path, package: Path, **engine: object) -> tuple[list[float], Path]:
    """The losses of two steps on two ranks, and the directory of the model."""
    out = folder / str(engine["name"])
    values = {
        "model": {"source": str(folder / "bert"), "strict": False},
        "task": {"name": MASKED, "source": str(folder / "text.txt"), "sequence_length": 16},
        "train": {"steps": 2, "batch_size": 2, "learning_rate": 1e-2},
        "engine": engine,
        "output": {"directory": str(out)},
    }
    (folder / "text.txt").write_text("the cat sat on the mat. " * 100)
    config = folder / f"{engine['name']}.yaml"
    config.write_text(yaml.safe_dump(values))
    path = os.pathsep.join([str(package), *sys.path])
    done = subprocess.run(
        [*ZEROSTART, "train", str(config), "--nproc", "2"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))], out


@pytest.mark.slow
def test_an_engine_that_is_installed_trains(tmp_path: Path, package: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=30522, **sizes)).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(minilm_path()).save_pretrained(tmp_path / "bert")
    losses, directory = trained(tmp_path, package, name="copies", zero_stage=0)
    wanted, reference = trained(tmp_path, package, name="fsdp2", zero_stage=0)
    assert losses == pytest.approx(wanted, rel=1e-5)
    have, want = (load_file(path / "model.safetensors") for path in (directory, reference))
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].equal(tensor) or (have[name] - tensor).abs().max() < 1e-5, name
