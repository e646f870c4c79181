"""TRL's GRPO with a real vLLM: zerostart's synchronisation changes no draw and no loss.

``make serving`` runs this. Each run is five steps on two ranks under ``accelerate launch``.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import CONFIGS, REHEARSAL, add_line, launch, write_tokenizer
from tests.serving.families import create_checkpoint
from tests.serving.tokens import PROMPT, greedy
from zerostart.upstream.trl.syncing import TOUCHED

pytest.importorskip("vllm")
pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("grpo.py")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "DS_ACCELERATOR": "cpu"}
ENVIRONMENT |= {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "warning"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = create_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoint"))
    write_tokenizer(path, 128)
    return path


def ran(checkpoint: Path, folder: Path, engine: str, *ours: str, **options: Any) -> list[dict[str, Any]]:
    """Run the script; return the results of both ranks."""
    arguments = [str(checkpoint), str(folder), json.dumps(options), *ours]
    # Without it accelerate leaves models whole where there is no accelerator; zerostart sees to it itself.
    script = SCRIPT.read_text() if ours or engine != "fsdp2" else add_line(SCRIPT.read_text(), REHEARSAL)
    launch(script, folder, CONFIGS[engine], arguments, environment=ENVIRONMENT, timeout=420)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_trl_is_as_declared() -> None:
    assert [point.find_misfit() for point in TOUCHED] == ["", ""]


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("zero3", {}),
        ("zero3", {"lora": True}),
        ("fsdp2", {}),
        ("fsdp2", {"vllm_tensor_parallel_size": 2}),  # one engine, half on each rank
    ],
    ids=["zero3", "zero3-lora", "fsdp2", "fsdp2-tensors"],
)
def test_colocated_runs_are_those_of_trls_own_synchronisation(
    engine: str, options: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    options = {"vllm_mode": "colocate", "unpacked": True, **options}
    stock = ran(checkpoint, tmp_path / "stock", engine, **options)
    ours = ran(checkpoint, tmp_path / "ours", engine, "ours", **options)
    assert ours == stock
    for rank in ours:
        assert len(rank["log"]) == 5
        assert len(set(rank["served"])) == len(rank["served"]) == 6  # one before each step, one after


@pytest.fixture
def server(checkpoint: Path) -> Iterator[str]:
    """vLLM's server as TRL's documentation has it, but for the name of the backend."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; vLLM's build for CPUs has no such command.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "4", "--max-logprobs", "-1"]
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--weight-transfer-config", json.dumps({"backend": "zerostart"})]
    started = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert started.poll() is None, "the server has not started"
            with contextlib.suppress(OSError):
                asked(address, "health")
                break
            time.sleep(0.5)
        yield address
    finally:
        started.terminate()
        started.wait(60)


def asked(address: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_a_server_has_the_weights_that_are_saved(
    engine: str, checkpoint: Path, server: str, tmp_path: Path
) -> None:
    actual = ran(checkpoint, tmp_path, engine, "ours", vllm_mode="server", vllm_server_base_url=server)
    assert all(len(rank["log"]) == 5 for rank in actual)
    wanted = {"model": str(checkpoint), "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    wanted |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    (answer,) = asked(server, "v1/completions", wanted)["choices"]
    assert answer["token_ids"] == greedy(tmp_path / "saved", PROMPT, 12) != greedy(checkpoint, PROMPT, 12)
    # One before each step, one after the last.
    assert asked(server, "weight_info") == {"weight_version": "6"}
