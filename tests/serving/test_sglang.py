"""A real SGLang takes pushed weights: with its own checksums of them, and in its tokens.

Where ``sglang`` can be imported, on a CPU (``SGLANG_USE_CPU_ENGINE``): no index has its kernels for that, so
what stands for them refuses, and SGLang computes by torch. ``make serving`` has no SGLang.
"""

import contextlib
import importlib.util
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
import torch

import zerostart
from tests.ranks import run_ranks
from tests.serving.families import made
from tests.serving.tokens import PROMPT, greedy
from tests.serving.trainers import adapted, shards
from zerostart.errors import ConfigError

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not here", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHOUT_KERNELS = Path(__file__).with_name("without_kernels")
LOADER = "zerostart.serving.sglang_weight_loader"
HOW = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
HOW += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-tokenizer-init"]
HOW += ["--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.5"]
HOW += ["--max-total-tokens", "512", "--context-length", "64", "--max-running-requests", "2"]
HOW += ["--log-level", "warning", "--skip-server-warmup"]
FSDP2: dict[str, Any] = {"engine": "fsdp2"}
ZERO2: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 2}
ZERO3: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}
#: Tensor parallel workers, and by family the trainer's ranks and options; the first trains on adapters too.
SERVED = {
    "qwen3": (2, [(2, {**ZERO3, "lora": True}), (1, FSDP2), (2, {**FSDP2, "tensor_parallel": 2})]),
    "qwen3_moe": (2, [(2, {**FSDP2, "expert_parallel": 2}), (2, ZERO2)]),
    "llama": (1, [(2, ZERO3)]),
    "gemma3_text": (1, [(2, FSDP2)]),
}


def _asked(address: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else {}


@contextlib.contextmanager
def _server(path: Path, *options: str) -> Iterator[str]:
    """The address of a server of SGLang, while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(path)]
    command += ["--host", "127.0.0.1", "--port", str(port), *HOW, *options]
    paths = [os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("sgl_kernel") is None:
        paths.append(str(WITHOUT_KERNELS))
    # A processor for each worker: else it wants a memory node for each.
    bound = "|".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"SGLANG_CPU_OMP_THREADS_BIND": bound} if "--tp-size" in options else {}
    server = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                _asked(address, "health")
                break
            time.sleep(0.5)
        assert server.poll() is None
        yield address
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def _tokens(address: str) -> list[int]:
    how = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    answer = _asked(address, "generate", {"input_ids": PROMPT, "sampling_params": how})
    return [int(token) for token in answer["output_ids"]]


def _push(path: Path, out: Path, address: str, options: dict[str, Any]) -> list[tuple[int, bool]]:
    """On one rank: two pushes, with a change before the second, whose weights are saved."""
    options = dict(options)
    lora = options.pop("lora", False)
    model = zerostart.load(path, progress=False, **options)
    if lora:
        model = adapted(model)
    with zerostart.refit(model, address, timeout=120) as refitter:
        found = [refitter.push()]
        for tensor in [p.data for p in model.parameters() if p.requires_grad] if lora else shards(model):
            tensor.mul_(-0.75)
        zerostart.save(model, out, merge_adapters=lora)
        found.append(refitter.push())
    return [(report.version, report.moved_bytes == report.owned_bytes) for report in found]


@pytest.mark.parametrize("family", SERVED)
def test_a_server_has_the_weights_of_its_own_load(family: str, tmp_path: Path) -> None:
    workers, cases = SERVED[family]
    before, after = made(family, tmp_path), made(family, tmp_path, seed=7)
    options = ["--tp-size", str(workers), "--custom-weight-loader", LOADER]
    with _server(before, *options) as address:
        for number, (ranks, how) in enumerate(cases):
            saved = tmp_path / f"saved-{number}"
            at_first = _tokens(address)
            pushed = run_ranks(_push, ranks, after, saved, address, how, timeout=240)
            assert pushed == [[(1, True), (2, True)]] * ranks
            assert _asked(address, "model_info")["weight_version"] == "2"
            found = _asked(address, "weights_checker", {"action": "checksum"})
            tokens = _tokens(address)
            # What was cached of the prompt under other weights is not used.
            assert tokens == greedy(saved, PROMPT, 12)
            assert number or tokens != at_first
            # SGLang's own load of the same weights, and its own checksum of every tensor.
            assert _asked(address, "update_weights_from_disk", {"model_path": str(before)})["success"]
            other = _asked(address, "weights_checker", {"action": "checksum"})
            assert _asked(address, "update_weights_from_disk", {"model_path": str(saved)})["success"]
            expected = _asked(address, "weights_checker", {"action": "checksum"})
            assert found["per_engine_checksum"] == expected["per_engine_checksum"]
            assert found["per_engine_checksum"] != other["per_engine_checksum"]


def test_a_server_that_was_not_told_of_the_loader_is_refused(tmp_path: Path) -> None:
    path = made("qwen3", tmp_path)
    with _server(path) as address:
        model = zerostart.load(path, engine="fsdp2", progress=False)
        with pytest.raises(ConfigError, match=f"--custom-weight-loader {LOADER}"):
            zerostart.refit(model, address)


def test_an_engine_in_the_trainers_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    if importlib.util.find_spec("sgl_kernel") is None:
        monkeypatch.syspath_prepend(str(WITHOUT_KERNELS))
        monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{WITHOUT_KERNELS}")
    import sglang

    before, after = made("qwen3", tmp_path), made("qwen3", tmp_path, seed=7)
    engine = sglang.Engine(
        model_path=str(before),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.5,
        max_total_tokens=512,
        context_length=64,
        max_running_requests=2,
        log_level="warning",
        custom_weight_loader=[LOADER],
    )
    try:
        how = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        at_first = engine.generate(input_ids=PROMPT, sampling_params=how)["output_ids"]
        model = zerostart.load(after, engine="fsdp2", progress=False, dtype=torch.float32)
        with zerostart.refit(model, engine, timeout=60) as refitter:
            assert refitter.push().workers[0].version == 1
            answer = engine.generate(input_ids=PROMPT, sampling_params=how)
            assert answer["output_ids"] == greedy(after, PROMPT, 12) != at_first
            assert answer["meta_info"]["weight_version"] == "1"
            assert refitter.push().version == 2
    finally:
        engine.shutdown()
