"""Push a saved model and its card to the hub."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import CommitOperationAdd, ModelCard

import zerostart
from tests.tiny import TinyCheckpoints
from zerostart.errors import WriteError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def commit_operations(monkeypatch: pytest.MonkeyPatch) -> dict[str, CommitOperationAdd]:
    """Collect the client's commit operations instead of sending them."""
    operations_by_path: dict[str, CommitOperationAdd] = {}

    def upload_folder(
        api: huggingface_hub.HfApi, repo_id: str, folder_path: Path, **patterns: list[str]
    ) -> None:
        assert repo_id == "me/mine"
        options = {"repo_type": "model", "token": None, **patterns}
        operations = api._prepare_upload_folder_additions(folder_path, "", **options)
        operations_by_path.update({operation.path_in_repo: operation for operation in operations})

    def create_repo(_: object, repo_id: str, **__: Any) -> huggingface_hub.RepoUrl:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "_validate_yaml", lambda *_, **__: None)  # network
    return operations_by_path


def test_push_sends_saved_files_and_a_card(
    commit_operations: dict[str, CommitOperationAdd], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoints("qwen3"))
    model = zerostart.load(str(snapshot), engine="fsdp2", progress=False)
    out = tmp_path / "trained"
    other_files = ["run.html", "cache/items-00000.safetensors", "src/model.safetensors", ".env"]
    for name in other_files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("a secret")
    zerostart.save(model, out, push_to_hub="me/mine")
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert commit_operations.keys() == written - set(other_files)
    assert {"README.md", "config.json", "model.safetensors", "zerostart.json"} <= commit_operations.keys()
    with commit_operations["model.safetensors"].as_file() as upload:
        assert upload.read() == (out / "model.safetensors").read_bytes()
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert (card.data.base_model_relation, card.data.library_name) == ("finetune", "transformers")
    assert COMMIT in card.text
    (out / "README.md").write_text("my own")
    zerostart.save(model, out, push_to_hub="me/mine")
    with commit_operations["README.md"].as_file() as upload:
        assert upload.read() == b"my own"


def test_refused_push_still_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = zerostart.load(
        {"weight": torch.ones(2, 2)},
        lambda: torch.nn.Linear(2, 2, bias=False),
        engine="fsdp2",
        progress=False,
    )
    out = tmp_path / "out"
    with pytest.raises(WriteError, match=r"out is saved, but not pushed to no/such/id: .*hf upload"):
        zerostart.save(model, out, push_to_hub="no/such/id")  # the client refuses this id
    zerostart.verify(out)
