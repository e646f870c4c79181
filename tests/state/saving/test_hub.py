"""A saved model on its way to the hub: what huggingface_hub is to commit, and the card, as it reads it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import CommitOperationAdd, ModelCard

import zerostart
from tests.cli.running import running
from tests.integrations.launching import tokenizer
from tests.state.saving.hub_server import serving
from tests.tiny import TinyCheckpoints
from tests.training.language import CAUSAL
from zerostart.distributed.world import World
from zerostart.errors import WriteError
from zerostart.state.saving.hub import push

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> dict[str, CommitOperationAdd]:
    """What would go over the network, by its path in the repository: the client's own operations."""
    found: dict[str, CommitOperationAdd] = {}

    def upload_folder(
        api: huggingface_hub.HfApi, repo_id: str, folder_path: Path, **patterns: list[str]
    ) -> None:
        assert repo_id == "me/mine"
        given = {"repo_type": "model", "token": None, **patterns}
        operations = api._prepare_upload_folder_additions(folder_path, "", **given)
        found.update({operation.path_in_repo: operation for operation in operations})

    def create_repo(_: object, repo_id: str, **__: Any) -> huggingface_hub.RepoUrl:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "_validate_yaml", lambda *_, **__: None)  # a call, too
    return found


def test_a_model_goes_up_with_a_card(
    committed: dict[str, CommitOperationAdd], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoints("qwen3"))
    model = zerostart.load(str(snapshot), engine="fsdp2", progress=False)
    out = tmp_path / "trained"
    beside = ["run.html", "cache/items-00000.safetensors", "src/model.safetensors", ".env"]
    for name in beside:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("a secret")
    zerostart.save(model, out, push_to_hub="me/mine")
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert committed.keys() == written - set(beside)
    assert {"README.md", "config.json", "model.safetensors", "zerostart.json"} <= committed.keys()
    with committed["model.safetensors"].as_file() as sent:
        assert sent.read() == (out / "model.safetensors").read_bytes()
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert (card.data.base_model_relation, card.data.library_name) == ("finetune", "transformers")
    assert COMMIT in card.text
    (out / "README.md").write_text("my own")
    zerostart.save(model, out, push_to_hub="me/mine")
    with committed["README.md"].as_file() as sent:
        assert sent.read() == b"my own"


def test_a_whole_pipeline_goes_up_and_nothing_beside_it(
    committed: dict[str, CommitOperationAdd], tmp_path: Path
) -> None:
    """As a run leaves it: the document of the save lies in the folder of what was trained."""
    index = {"_class_name": "Any", "transformer": ["diffusers", "Any"], "vae": ["diffusers", "Any"]}
    parts = ["README.md", "model_index.json", "transformer/config.json", "vae/config.json"]
    for name in [*parts, "transformer/.zerostart/0/part", "cache/index.safetensors", "run.html"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(index))
    push(tmp_path, "me/mine", "", {}, World(0, 1, None))
    assert sorted(committed) == sorted(parts)


def test_export_pushes_and_names_no_path_of_this_machine(
    committed: dict[str, CommitOperationAdd],
    checkpoints: TinyCheckpoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = running("export")(
        capsys, str(checkpoints("qwen3")), str(tmp_path / "out"), "--push-to-hub", "me/mine"
    )
    assert (code, out.splitlines()[-1]) == (0, "pushed to https://huggingface.co/me/mine")
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert committed.keys() == written
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"`{Path(checkpoints('qwen3')).name}`" in text
    assert str(tmp_path.parent) not in text


@pytest.mark.slow
def test_a_whole_run_pushes_what_it_has_saved(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """huggingface_hub's own client, over HTTP, on two ranks; the run's page and metrics stay here."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("w5 w6 w7 w8 w9 " * 100)
    tokenizer(tmp_path / "tokenizer")
    config = {
        "model": {"source": str(checkpoints("qwen3"))},
        "task": {
            "name": CAUSAL,
            "source": str(text),
            "tokenizer": str(tmp_path / "tokenizer"),
            "sequence_length": 16,
        },
        "engine": {"name": "fsdp2"},
        "train": {"steps": 2, "batch_size": 2, "learning_rate": 1e-2},
        "output": {"directory": str(out), "push_to_hub": "me/trained", "hub_private": True},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "zerostart", "train", "run.yaml", "--nproc", "2"]
    with serving(slow=1.5) as hub:
        told = hub.environment(tmp_path / "home")
        done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert f"pushed to {hub.endpoint}/me/trained" in done.stdout
        pushed = hub.files["me/trained"]
        assert pushed == {name: (out / name).read_bytes() for name in pushed}
        left = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} - pushed.keys()
        assert {"model.safetensors", "config.json", "README.md", "zerostart.json"} <= pushed.keys()
        assert "metrics.jsonl" in left
        assert not any(name.endswith((".safetensors", ".json")) for name in left), left
        assert "| steps | 2 |" in pushed["README.md"].decode()
        assert hub.private == {"me/trained": True}
        # A mistake is told before anything is loaded, and nothing of that run is anywhere.
        hub.private["me/trained"] = False
        command += [f"output.directory={tmp_path / 'other'}"]
        done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert (
            "output.push_to_hub: me/trained cannot be written to (me/trained is there and pub" in done.stderr
        )
        assert not list(tmp_path.glob("other/*"))


def test_what_the_hub_refuses_is_saved_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = zerostart.load(
        {"weight": torch.ones(2, 2)},
        lambda: torch.nn.Linear(2, 2, bias=False),
        engine="fsdp2",
        progress=False,
    )
    out = tmp_path / "out"
    with pytest.raises(WriteError, match=r"out is saved, but not pushed to no/such/id: .*hf upload"):
        zerostart.save(model, out, push_to_hub="no/such/id")  # which the client itself refuses
    zerostart.verify(out)
