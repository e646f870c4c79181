"""``zerostart config``: what it writes is taken by ``zerostart train``, as it is and with its comments."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from zerostart.cli import main
from zerostart.engines import check_choice
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.engine_config import engine_config
from zerostart.training.config.load import load_config, parse_config
from zerostart.training.config.templates import LORA, TEMPLATES, described, template_of
from zerostart.training.loop.task import task_class

ENGINES = [(name, stage) for name in ("deepspeed", "fsdp2") for stage in range(4)]


def engine(name: str, stage: int) -> Any:
    return check_choice(name, stage).for_stage(stage, None, Mesh(1), None)


def undone(text: str) -> str:
    """Every key that stands there as a comment, as a key."""
    for _ in range(2):  # keys of sections that are comments themselves
        text = re.sub(r"^(\s*)# (?=\s*(?:# )?[a-z_0-9]+:)", r"\1", text, flags=re.MULTILINE)
    return text


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_is_written_is_taken(family: str, tmp_path: Path) -> None:
    for number, (name, stage) in enumerate(ENGINES):
        for lora in (False, True):
            template, values = template_of(family)
            text = described(template, values, engine(name, stage), lora)
            path = tmp_path / f"{number}{lora}.yaml"
            path.write_text(text)
            config = load_config(path)
            assert (config.engine.name, config.engine.zero_stage) == (name, stage)
            assert config.task.name == template.values["task.name"]
            assert (config.lora is not None) == lora
            every = yaml.safe_load(undone(text))
            assert set(every) >= {*template.sections, *template.offered}
            path.write_text(undone(text))
            offered = dict.fromkeys(template.offered)
            assert load_config(path).model_copy(update=offered) == parse_config(config.model_dump())


def known(key: str, task: str) -> bool:
    section, _, name = key.partition(".")
    described = TrainConfig.model_fields.get(section)
    if described is None or not name:
        return described is not None
    kinds = [task_class(task).Settings] if section == "task" else [described.annotation]
    kinds += list(getattr(kinds[0], "__args__", ()))
    return any(name in getattr(kind, "model_fields", {}) for kind in kinds)


def test_keys_are_those_of_a_configuration() -> None:
    tasks = {str(template.values["task.name"]) for template in TEMPLATES.values()}
    for template in TEMPLATES.values():
        assert [key for key in template.values if not known(key, str(template.values["task.name"]))] == []
    assert [key for key in LORA if not any(known(key, task) for task in tasks)] == []


def test_files_for_launchers_and_no_file_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    for expected in (0, 1):
        with pytest.raises(SystemExit) as ended:
            main(["config", "qwen-image", str(out), "--zero-stage", "2", "--accelerate"])
        assert ended.value.code == expected
    assert "run.yaml, " in (told := capsys.readouterr().err)
    assert told.count("already exist; choose another name") == 1
    launcher = yaml.safe_load((tmp_path / "run.accelerate.yaml").read_text())
    assert launcher["distributed_type"] == "MULTI_GPU"
    filled = engine_config(load_config(out, ["train.accumulation=3"]), world_size=2, hidden_size=16)
    assert filled["gradient_accumulation_steps"] == 3


def test_a_directory_is_looked_at(tmp_path: Path) -> None:
    cases = [
        ("config.json", {"_class_name": "FluxTransformer2DModel"}, "flux"),
        ("model_index.json", {"transformer": ["diffusers", "WanTransformer3DModel"]}, "wan"),
    ]
    for number, (file, settings, family) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file).write_text(json.dumps(settings))
        assert template_of(str(folder)) == (TEMPLATES[family], {"model.source": str(folder)})
    (folder / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    for named, message in (
        (folder, "belongs to no known family"),
        (tmp_path, "has neither"),
        ("gpt", "neither a family"),
    ):
        with pytest.raises(ConfigError, match=message):
            template_of(str(named))
