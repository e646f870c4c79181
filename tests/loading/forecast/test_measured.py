"""Measured host memory of ranks in fresh processes against the forecast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 16000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_measured_peak_is_near_the_forecast(engine: str, tmp_path: Path) -> None:
    config, source, out = tmp_path / "config.json", tmp_path / "llama", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", "from zerostart.cli import main; main()"]
    subprocess.run([*command, "synth", config, source], check=True, timeout=120)
    options = ["--nproc", "3", "--engine", engine, "--json", out]
    subprocess.run([*command, "load", source, *options], check=True, timeout=240)
    report = json.loads(out.read_text())
    forecast = max(rank["peak_host_bytes"] for rank in report["forecast"])
    measured = max(rank["peak_host_bytes"] for rank in report["ranks"])
    assert 0.9 * forecast <= measured <= 1.1 * forecast
