"""``zerostart train`` accepts files of ``zerostart config``, also with comments as keys."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from zerostart.cli import main
from zerostart.engines import check_choice
from zerostart.geometry.layout import Mesh
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.engine_config import engine_config
from zerostart.training.config.load import load_config, parse_config
from zerostart.training.config.templates import TEMPLATES, render_template

ENGINES = [(name, stage) for name in ("deepspeed", "fsdp2") for stage in range(4)]


def choose_engine(name: str, stage: int) -> Any:
    return check_choice(name, stage).for_stage(stage, None, Mesh(1), None)


def uncomment(text: str) -> str:
    """Turn every commented key into a key."""
    for _ in range(2):  # keys of a commented section are commented twice
        text = re.sub(r"^(\s*)# (?=\s*(?:# )?[a-z_0-9]+:)", r"\1", text, flags=re.MULTILINE)
    return text


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_are_accepted(family: str, tmp_path: Path) -> None:
    for number, (name, stage) in enumerate(ENGINES):
        for lora in (False, True):
            text = render_template(family, choose_engine(name, stage), lora)
            path = tmp_path / f"{number}{lora}.yaml"
            path.write_text(text)
            config = load_config(path)
            assert (config.engine.name, config.engine.zero_stage) == (name, stage)
            assert (config.lora is not None) == lora
            path.write_text(uncomment(text))
            optional = {"samples": None, "ema": None}
            assert set(TrainConfig.model_fields) - set(yaml.safe_load(uncomment(text))) <= {"lora"}
            assert load_config(path).model_copy(update=optional) == parse_config(config.model_dump())


def test_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    for expected in (0, 1):
        with pytest.raises(SystemExit) as ended:
            main(["config", "qwen-image", str(out), "--zero-stage", "2"])
        assert ended.value.code == expected
    assert "run.yaml already exists; choose another name" in capsys.readouterr().err
    config = load_config(out, ["train.accumulation=3"])
    filled = engine_config(config.engine, config.train, config.precision, 2, 16)
    assert filled["gradient_accumulation_steps"] == 3
