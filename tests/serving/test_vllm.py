"""Push weights into a real vLLM, and compare parameters and tokens.

``make serving`` runs this, in an environment with vLLM's build for CPUs.
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
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.serving.families import FAMILIES, create_checkpoint
from tests.serving.tokens import PROMPT, greedy
from tests.serving.trainers import push_changed, save_adapters

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FSDP2: dict[str, Any] = {"engine": "fsdp2"}
ZERO2: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 2}
ZERO3: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}
#: Number of workers, expert parallelism, and cases of model family, trainer ranks and load options.
CASES = {
    "one worker": (
        1,
        False,
        [
            ("qwen3", 2, ZERO3),
            ("llama", 2, ZERO2),
            ("gemma3_text", 1, FSDP2),
            ("qwen3_moe", 2, {**FSDP2, "expert_parallel": 2}),
            ("gpt_oss", 2, FSDP2),
            ("deepseek_v3", 2, ZERO3),
            ("qwen3", 2, {**ZERO3, "lora": True}),
            ("llama", 4, {**FSDP2, "tensor_parallel": 2}),
        ],
    ),
    "tensor parallel": (
        2,
        False,
        [
            ("qwen3", 2, {**FSDP2, "tensor_parallel": 2}),
            ("gemma3_text", 2, FSDP2),
            ("gpt_oss", 2, ZERO3),
            ("qwen3_moe", 4, FSDP2),
            ("llama", 4, ZERO3),
            ("deepseek_v3", 2, ZERO2),
            ("qwen3_moe", 2, {**ZERO3, "expert_parallel": 2}),
            ("llama", 2, {**FSDP2, "lora": True}),
            ("qwen3_moe", 2, {**FSDP2, "expert_parallel": 2, "lora": "experts"}),
            ("qwen3_moe", 2, {**ZERO3, "expert_parallel": 2, "lora": "experts"}),
        ],
    ),
    "expert parallel": (
        2,
        True,
        [
            ("qwen3_moe", 2, {**ZERO3, "expert_parallel": 2}),
            ("deepseek_v3", 1, FSDP2),
            ("qwen3_moe", 4, ZERO2),
            ("qwen3_moe", 2, {**FSDP2, "tensor_parallel": 2}),
            ("gpt_oss", 2, {**FSDP2, "expert_parallel": 2}),
            ("qwen3_moe", 2, {**ZERO2, "lora": True}),
            ("qwen3_moe", 4, {**ZERO2, "expert_parallel": 2, "lora": "experts"}),
        ],
    ),
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_the_engines_own_load(name: str, tmp_path: Path) -> None:
    workers, expert_parallel, cases = CASES[name]
    jobs = [
        {
            "checkpoint": str(create_checkpoint(family, tmp_path, "bfloat16")),
            "saved": str(tmp_path / f"saved-{index}"),
            "address": f"unix://{tmp_path}/{index}",
            "rendezvous": str(tmp_path / f"rendezvous-{name[:3]}-{index}-{os.getpid()}"),
            "expert_parallel": expert_parallel,
        }
        for index, (family, _, _) in enumerate(cases)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.serving.engine"]
    processes = [
        subprocess.Popen([*command, str(rank), str(workers), str(tmp_path), str(tmp_path / "jobs.json")])
        for rank in range(workers)
    ]
    try:
        # Importing vLLM takes longer than trainer ranks wait for each other.
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(workers)):
            assert all(worker.poll() is None for worker in processes)
            time.sleep(0.2)
        for job, (_, ranks, options) in zip(jobs, cases, strict=True):
            run_ranks(
                push_changed,
                ranks,
                Path(job["checkpoint"]),
                Path(job["saved"]),
                job["address"],
                workers,
                options,
                timeout=180,
            )
        assert [worker.wait(120) for worker in processes] == [0] * workers
    finally:
        for worker in processes:
            worker.kill()
    for index, (family, _, _) in enumerate(cases):
        for rank in range(workers):
            actual = json.loads((tmp_path / f"{index}-{rank}.json").read_text())
            assert actual["version"] == 2, family
            assert actual["differing"] == [], family
            assert actual["moved"] == [], family
            # A tied head is filled with the embedding.
            assert set(actual["left"]) <= {"lm_head.weight"}, family
            assert actual["compared"] > 10, family


@pytest.fixture
def engines() -> Iterator[Any]:
    """Function that creates an ``LLM``, which is shut down afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    processes = []

    def make(path: Path, dtype: str = "float32", **options: Any) -> Any:
        engine = LLM(
            model=str(path),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            max_num_seqs=2,
            **options,
        )
        processes.append(engine)
        return engine

    yield make
    for engine in processes:
        engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _tokens(engine: Any) -> list[int]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_generates_like_transformers_from_pushed_weights(
    family: str, engines: Any, tmp_path: Path
) -> None:
    from zerostart.serving import register_with_vllm

    register_with_vllm()
    before, after = create_checkpoint(family, tmp_path), create_checkpoint(family, tmp_path, seed=7)
    # Alternates between families.
    with_transfer_config = list(FAMILIES).index(family) % 2 == 0
    try:
        engine = engines(
            before, **({"weight_transfer_config": {"backend": "zerostart"}} if with_transfer_config else {})
        )
    except RuntimeError as error:
        if "expect weight to be bfloat16" not in str(error):
            raise
        pytest.skip("vLLM itself loads no latent attention in fp32 on a CPU with AMX")
    tokens_before = _tokens(engine)
    model = zerostart.load(after, engine="fsdp2", progress=False)
    with zerostart.refit(model, engine) as refitter:
        assert refitter.push().workers[0].version == 1
        assert _tokens(engine) == greedy(after, PROMPT, 12) != tokens_before
        assert refitter.push().version == 2
    assert _tokens(engine) == greedy(after, PROMPT, 12)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_vllm_adds_to_each_expert_what_peft_merges(family: str, engines: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    path = create_checkpoint(family, tmp_path)
    run_ranks(save_adapters, 2, path, tmp_path, {**FSDP2, "expert_parallel": 2}, timeout=180)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = {name: -tensor for name, tensor in base.state_dict().items()}
    merged: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    for name, tensor in merged.state_dict().items():
        expected[name] += tensor

    # vLLM's experts with LoRA need Triton to run, so vLLM's build for CPUs can only load the adapter.
    engine = engines(path, "bfloat16", enable_lora=True, max_lora_rank=8, lora_dtype=torch.float32)
    engine.llm_engine.add_lora(LoRARequest("adapter", 1, str(tmp_path / "served")))
    model = engine.llm_engine.model_executor.driver_worker.model_runner.model
    actual = {}
    for path_in_vllm, module in model.named_modules():
        name = path_in_vllm.replace("block_sparse_moe", "mlp")  # Mixtral's
        if hasattr(module, "w13_lora_a_stacked"):
            gate_up = zip(module.w13_lora_b_stacked, module.w13_lora_a_stacked, strict=True)
            actual[f"{name}.gate_up_proj"] = torch.cat([b[0] @ a[0] for b, a in gate_up], 1)
            actual[f"{name}.down_proj"] = module.w2_lora_b_stacked[0][0] @ module.w2_lora_a_stacked[0][0]
        elif name.endswith("o_proj"):
            actual[f"{name}.weight"] = module.lora_b_stacked[0][0, 0] @ module.lora_a_stacked[0][0, 0]
    # vLLM has the query and value projections in one layer, unlike PEFT.
    changed = {name for name, tensor in expected.items() if tensor.any()}
    assert actual.keys() == {
        name for name in changed if not name.endswith(("q_proj.weight", "v_proj.weight"))
    }
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def _request(address: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


def _send_by_the_trainer_factory(path: Path, address: str) -> None:
    from vllm.distributed import weight_transfer

    source = zerostart.weight_source(zerostart.load(path, engine="fsdp2", progress=False))
    assert isinstance(source, weight_transfer.WeightSource)
    groups = [name for names, _ in source.iter_groups() for name in names]
    assert groups == [meta.name for meta in source.metadata()]

    from zerostart.refit.vllm_engine import TrainerInit

    trainer = weight_transfer.WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=0), client=weight_transfer.HTTPVLLMWeightSyncClient(address), source=source
    )
    trainer.send_weights()
    trainer.shutdown()


def test_a_server_loads_weights_and_reports_their_version(tmp_path: Path) -> None:
    if not entry_points(group="vllm.general_plugins", name="zerostart"):
        pytest.skip("zerostart was installed before vLLM could find it: install it again")
    before, after = create_checkpoint("qwen3", tmp_path), create_checkpoint("qwen3", tmp_path, seed=7)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(before)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "2", "--skip-tokenizer-init"]
    command += ["--weight-transfer-config", json.dumps({"backend": "zerostart"})]
    completion = {
        "model": str(before),
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    completion |= {"detokenize": False, "return_token_ids": True}
    server = subprocess.Popen(command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"})
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                _request(address, "health")
                break
            time.sleep(0.5)
        model = zerostart.load(after, engine="fsdp2", progress=False)
        with zerostart.refit(model, address) as refitter:
            refitter.push()
            refitter.push()
            (answer,) = _request(address, "v1/completions", completion)["choices"]
        assert answer["token_ids"] == greedy(after, PROMPT, 12)
        assert _request(address, "weight_info") == {"weight_version": "2"}
        _send_by_the_trainer_factory(before, address)
        _request(address, "reset_prefix_cache", {})
        (answer,) = _request(address, "v1/completions", completion)["choices"]
        assert answer["token_ids"] == greedy(before, PROMPT, 12)
    finally:
        server.terminate()
        server.wait(60)
