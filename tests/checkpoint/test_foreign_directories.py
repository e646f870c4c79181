"""Save into directories with forged, linked or foreign files."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import zerostart
from tests.checkpoint.shared_directory import (
    KINDS,
    SHARDS,
    SINGLE,
    read_plainly,
    save_model,
    save_state,
    value_of,
)
from zerostart.errors import WriteError


@pytest.mark.parametrize(
    "change",
    [
        {"content": []},
        {"digests": {".": {"a": []}}},
        {"saved_at_ns": []},
        {"switch": ["gone"], "over": ["x"]},
        {"switch": "gone", "over": 5},
    ],
)
def test_malformed_manifests_are_ignored(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "out"
    save_model(path, 1.0)
    document = json.loads((path / "zerostart.json").read_text()) | change
    pending = path / ".zerostart" / "0123456789ab" / "zerostart.json"
    pending.parent.mkdir(parents=True)
    for file in (pending, path / "zerostart.json"):
        file.write_text(json.dumps(document))
    for kind, save in KINDS.items():
        save(path, 2.0, SINGLE)
        assert value_of(path, kind) == 2.0


def test_linked_files_are_replaced(tmp_path: Path) -> None:
    """Links like the hub's are replaced; their targets stay."""
    for number, (old, new) in enumerate([(SINGLE, SHARDS), (SHARDS, SINGLE), (SHARDS, SHARDS)]):
        blobs, path = tmp_path / f"blobs-{number}", tmp_path / f"out-{number}"
        save_model(blobs, 1.0, old)
        path.mkdir()
        for file in blobs.iterdir():
            (path / file.name).symlink_to(file)
        save_model(path, 2.0, new)
        assert value_of(path, "model") == 2.0
        assert read_plainly(path, index_first=True) == 2.0
        assert value_of(blobs, "model") == 1.0


def test_foreign_state_json_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "state.json").write_text('{"my": "state"}')
    for value in (1.0, 2.0):
        save_model(path, value)
        assert zerostart.verify(path).tensors == 3
    assert json.loads((path / "tokenizer.json").read_text()) == {"value": 2.0}
    with pytest.raises(WriteError, match=r"state\.json was not written by zerostart"):
        save_state(path, 1.0)
    assert (path / "state.json").read_text() == '{"my": "state"}'
    assert not (path / ".zerostart").exists()


def test_undeletable_old_weights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint is complete; the next save cleans up."""
    path = tmp_path / "out"
    save_model(path, 1.0)
    unlink = Path.unlink

    def refuse_one_file(self: Path, missing_ok: bool = False) -> None:
        if self.name == "model-00001-of-00002.safetensors":
            raise PermissionError(errno.EPERM, "not permitted", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse_one_file)
        for _ in range(2):
            with pytest.raises(WriteError, match=r"model-00001-of-00002\.safetensors\): not permitted"):
                save_model(path, 2.0)
            assert value_of(path, "model") == 2.0
            zerostart.verify(path)
    save_model(path, 3.0)
    assert value_of(path, "model") == 3.0
    assert len(list(path.glob("model-*-of-*.safetensors"))) == 2
