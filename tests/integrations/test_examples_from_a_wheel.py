"""Run the scripts of ``examples/roles`` from a built wheel, outside the checkout."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.documents.folders import make_folders
from tests.processes import SOURCES
from tests.tiny import TinyCheckpoints

REPOSITORY = Path(__file__).parents[2]
ROLES = REPOSITORY / "examples" / "roles"
SECONDS = 240
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Environment variables with which ``zerostart`` is imported from a built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # keeps setuptools' build files out of the checkout
    shutil.copytree(REPOSITORY / "src" / "zerostart", source / "src" / "zerostart")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("zerostart-*.whl")
    site = folder / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != SOURCES]
    environment["PYTHONPATH"] = os.pathsep.join([str(site), *paths])
    environment["PATH"] = os.pathsep.join(
        [str(site / "bin"), str(Path(sys.executable).parent), environment["PATH"]]
    )
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    location = run([sys.executable, "-c", "import zerostart; print(zerostart.__file__)"], folder, environment)
    assert Path(location.strip()).is_relative_to(site)
    return environment


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        timeout=SECONDS,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout


def test_the_trainer_example(
    environment: Mapping[str, str], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    make_folders(tmp_path, {"model": "text:qwen3"}, checkpoints)
    (tmp_path / "corpus.txt").write_text("a cat sees the sea and sleeps. " * 40)
    fsdp2 = REPOSITORY / "examples" / "adoption" / "accelerate_config_fsdp2.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command = [*launch, "--config_file", str(fsdp2), str(ROLES / "trainer.py"), "model", "corpus.txt", "out"]
    run(command, tmp_path, environment)
    assert (tmp_path / "out" / "checkpoint-20" / "trainer_state.json").exists()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)


@pytest.mark.slow
def test_several_nodes_and_a_preemption(
    environment: Mapping[str, str], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Stop two launchers, like two nodes, and continue on one rank."""
    make_folders(tmp_path, {"model": "qwen3"}, checkpoints)
    script = [str(ROLES / "nodes.py"), "model", "run"]
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost", "--master-port", port]
    logs = [(tmp_path / f"{node}.log").open("w+") for node in range(2)]
    nodes = [
        subprocess.Popen(
            [*TORCHRUN, *meet, "--node-rank", str(node), *script, "100000"],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for node, log in enumerate(logs)
    ]
    texts = ["", ""]
    try:
        end = time.monotonic() + SECONDS
        while not any("step 5 " in text for text in texts):
            assert time.monotonic() < end, texts
            assert all(node.poll() is None for node in nodes), texts
            time.sleep(0.2)
            texts = [Path(log.name).read_text() for log in logs]
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(timeout=60)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    output = "".join(Path(log.name).read_text() for log in logs)
    stopped = max(int(line.split()[3]) for line in output.splitlines() if line.startswith("rank "))
    assert (tmp_path / "run" / "state" / "state.json").exists(), output
    resumed = run([*TORCHRUN, "--standalone", *script, str(stopped + 2)], tmp_path, environment)
    steps = [int(line.split()[3]) for line in resumed.splitlines() if line.startswith("rank 0 step")]
    assert steps == [stopped + 1, stopped + 2]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.slow
def test_a_custom_module(environment: Mapping[str, str], tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    names = [f"layers.{n}.attention.w{part}.weight" for n in range(2) for part in "qkvo"]
    original = {name: torch.randn(64, 64, generator=draw) / 8 for name in names}
    torch.save(original, tmp_path / "original.pt")
    (tmp_path / "data.txt").write_text("not a model file")
    script = [str(ROLES / "module.py"), "original.pt", "out"]
    run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *script], tmp_path, environment)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        change = (saved[name] - tensor).abs()
        assert 0 < change.max() < 1.2e-3, name  # one step of AdamW at 1e-3
    assert not (tmp_path / "out" / "data.txt").exists()


@pytest.mark.slow
def test_a_pipeline(environment: Mapping[str, str], checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    make_folders(tmp_path, {"Qwen/Qwen-Image": "pipeline:qwen_image", "pictures": "pictures:2"}, checkpoints)
    text = (ROLES / "lora.yaml").read_text().replace("512", "16")
    (tmp_path / "lora.yaml").write_text(text)
    run(["zerostart", "train", "lora.yaml", "train.steps=2", "--nproc", "2"], tmp_path, environment)
    script = [str(ROLES / "draw.py"), "Qwen/Qwen-Image", "out", "16", "a cat", "the sea", "a cat sleeps"]
    output = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *script], tmp_path, environment)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["0.png", "1.png", "2.png"]
    assert "rank 1: 1.png is 'the sea'" in output
