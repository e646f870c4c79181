"""Runs under ``accelerate launch``, which may start ranks but no engine."""

import pytest

from zerostart.cli import main
from zerostart.errors import ConfigError
from zerostart.training.config.engine_config import check_launcher
from zerostart.training.config.load import load_config


def test_plain_launcher_is_accepted() -> None:
    check_launcher("no")


@pytest.mark.parametrize("engine", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_an_engine_of_the_launcher_is_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ConfigError, match=r"in the section engine .* plain multi-process accelerate"):
        check_launcher("no")


def test_another_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="mixed_precision: fp16, but this run's configuration"):
        check_launcher("no")


def test_generated_config_agrees_with_a_plain_launcher(tmp_path: object) -> None:
    out = f"{tmp_path}/run.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["config", "qwen-image", out])
    assert ended.value.code == 0
    check_launcher(load_config(out).train.mixed_precision)
