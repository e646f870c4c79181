"""What ranks in fresh processes take, beside what was foreseen: imports on the way are no part of a load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {
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
def test_a_small_model_takes_what_is_foreseen(engine: str, tmp_path: Path) -> None:
    config, source, out = tmp_path / "config.json", tmp_path / "llama", tmp_path / "out.json"
    config.write_text(json.dumps(SMALL))
    command = [sys.executable, "-c", "from zerostart.cli import main; main()"]
    subprocess.run([*command, "synth", config, source], check=True, timeout=120)
    options = ["--nproc", "3", "--engine", engine, "--json", out]
    subprocess.run([*command, "load", source, *options], check=True, timeout=240)
    made = json.loads(out.read_text())
    foreseen = max(rank["peak_host_bytes"] for rank in made["forecast"])
    taken = max(rank["peak_host_bytes"] for rank in made["ranks"])
    assert 0.9 * foreseen <= taken <= 1.1 * foreseen
