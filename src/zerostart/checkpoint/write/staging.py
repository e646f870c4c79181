"""Save into a directory: write new files and publish them by one rename.

A save locks the directory and writes all files into ``.zerostart/TOKEN``. The document is the JSON file that
lists the files of a save (``zerostart.json`` or ``state.json``). A content is a model or the adapter next to
it. For each content the save does these steps:

1. Rename the new weights to names that no file has.
2. Publish them by one rename, the switch: of the index, the single weights file, or the document.
3. Rename the other files.
4. Delete the weights that the old index or document lists.

``.zerostart/TOKEN.plan`` lists these steps. If a save is killed, the next save or reader completes it after
the switch and undoes it before the switch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.manifest import (
    FORMAT,
    HIDDEN,
    INDEX,
    MARKER,
    MARKERS,
    PLAN_SUFFIX,
    SAVED_AT,
    WEIGHTS,
    contents_of,
    current,
    group_of,
    grouped,
    is_foreign,
    is_inside,
)
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import JsonObject, read_json
from zerostart.checkpoint.write.folders import LOCK_NAME, lock_directory, sync, sync_directory, write_whole
from zerostart.errors import CheckpointError, VerifyError, WriteError, ZerostartError

#: Config files that a reader needs for the weights; each save replaces them with the weights.
CONTENT = ("config.json", "adapter_config.json")


@dataclass
class RenamePlan:
    """Renames and deletions that publish one content.

    All names are paths relative to the directory.
    """

    #: File name of the document; empty if the save writes none.
    marker: str
    #: Staged file whose rename publishes the save; empty to delete a checkpoint.
    switch: str
    #: Single weights file that readers would prefer to ``switch``: deleted right after the switch.
    replaced_file: str = ""
    #: Staged files that are renamed before the switch, with their new names.
    before: dict[str, str] = field(default_factory=dict)
    #: Staged files that are renamed after the switch.
    after: list[str] = field(default_factory=list)
    #: Files of the old checkpoint that are deleted after the switch.
    drop: list[str] = field(default_factory=list)
    #: Folders that the save creates, or that a deletion may leave empty.
    folders: list[str] = field(default_factory=list)

    def is_safe(self, path: Path, staged: Path) -> bool:
        """Return True if all names are inside ``path`` and ``staged``.

        Any program may have written the plan file, and linked the folder.
        """
        if not isinstance(self.before, dict) or staged.is_symlink():
            return False
        lists = (self.after, self.drop, self.folders, list(self.before.values()), list(self.before))
        if not all(isinstance(one, list) for one in lists):
            return False
        names = [name for one in lists for name in one] + [
            n for n in (self.switch, self.replaced_file) if n != ""
        ]
        is_known = self.marker in ("", *MARKERS)
        places = (path, staged)
        return is_known and all(
            is_inside(name) and not any(_linked_parent(place, name) for place in places) for name in names
        )


class Staging:
    """Save into a directory, created by one process.

    All writers use its ``directory``. Writers put all files below ``directory``. Then :meth:`complete`
    publishes them, or :meth:`discard` deletes them. ``discard`` may be called at any time, and
    repeatedly.
    """

    def __init__(self, path: str | os.PathLike[str], marker: str = MARKER) -> None:
        """Create the directories and recover from a killed save.

        ``marker`` is the file name of the document, empty for none. Readers find the files of a
        training state through its document, and others by the usual names of weights.
        """
        # Resolved once: a link that changes later must not redirect the save.
        self.path = Path(os.path.realpath(expanded(path)))
        self._marker = marker
        self._by_document = marker not in (MARKER, "")
        self._token = uuid.uuid4().hex[:12]
        self.directory = self.path / HIDDEN / self._token
        self._new_folders: list[Path] = []
        self._lock = contextlib.ExitStack()
        try:
            with write_errors(self.path, "nothing was saved"):
                if self.path.exists() and not self.path.is_dir():
                    raise WriteError(f"{self.path} is a file; save to a directory, or remove it")
                if marker and is_foreign(self.path / marker):
                    raise WriteError(
                        f"{self.path / marker} was not written by zerostart, and this save would replace it: "
                        "rename it, or save to another directory"
                    )
                self._make_path()
                if self._lock.enter_context(lock_directory(self.path)) is False:
                    raise _locked_error(self.path)
                _recover(self.path)
                self.directory.mkdir()
        # Also after an interrupt: a save that has not started must release the lock.
        except BaseException:
            self.discard()
            raise

    def _make_path(self) -> None:
        for place in reversed([place for place in (self.path, *self.path.parents) if not place.exists()]):
            place.mkdir(exist_ok=True)
            self._new_folders.append(place)
            sync_directory(place.parent)

    def complete(self, document: JsonObject) -> dict[str, str]:
        """Publish all files; return the new weights names.

        The written document has the entries of ``document`` and "files", with "bytes" and "sha256" of
        each file. Weights whose folder has an entry in "digests" get no "sha256". Entries that
        "files" already contains are kept; their files need not be staged. The result maps staged
        names to new names.

        Raises WriteError. The directory is then unchanged, unless the message says otherwise.
        """
        document = {SAVED_AT: time.time_ns(), **document} if self._marker == MARKER else document
        state, names = "nothing was saved, and the directory is unchanged", dict[str, str]()
        with write_errors(self.path, state):
            described_before = document.get("files", {})
            staged = _files_below(self.directory)
            for name in staged:
                sync(self.directory / name)
            files = {
                **described_before,
                **{name: described_before.get(name) or self._describe(name, document) for name in staged},
            }
        contents = {"": list(files)} if self._by_document else grouped(files, staged=True)
        # One switch for each content.
        for key, group_files in contents.items():
            described = {**document, "format": FORMAT, "files": {name: files[name] for name in group_files}}
            if not self._by_document and "digests" in document:
                folders = {str(Path(name).parent) for name in group_files if name.endswith(".safetensors")}
                described["digests"] = {f: d for f, d in document["digests"].items() if f in folders}
            names |= self._publish(key, described, state)
            state = "only a part was saved: save again"
        with write_errors(self.path, "all files are saved, but temporary files may remain: save again"):
            shutil.rmtree(self.directory, ignore_errors=True)
            self._lock.close()
        return names

    def _publish(self, key: str, document: JsonObject, state: str) -> dict[str, str]:
        with write_errors(self.path, state):
            plan = _Planner(self.path, self._token, self._marker, self._by_document, key, document).plan
            for name in (plan.switch, plan.replaced_file, *plan.before.values(), *plan.after):
                if link := _linked_parent(self.path, name):
                    raise WriteError(f"{link} is a symbolic link: save to another directory")
            # Written before the plan: recovery takes a switch that is not staged for one that was renamed.
            if self._marker:
                _write_json(self.directory / self._marker, document, indent=1)
            _write_plan(self.path, self._token, plan)
            _switch(self.path, self.directory, plan)
        with write_errors(self.path, "all files are saved, but a power failure may lose them: save again"):
            _finish(self.path, self.directory, plan)
            (self.path / HIDDEN / f"{self._token}{PLAN_SUFFIX}").unlink()
        return plan.before

    def discard(self) -> None:
        """Delete unpublished files; complete a switched save."""
        # The caller raises its own error. The next save deletes what cannot be deleted now.
        with contextlib.suppress(OSError, ZerostartError), self._lock:
            if self.directory.parent.is_dir():
                _recover(self.path, self._token)
        for place in reversed(self._new_folders):
            _remove_empty(place)

    def _describe(self, name: str, document: JsonObject) -> JsonObject:
        file = self.directory / name
        is_hashed = self._marker and str(Path(name).parent) not in document.get("digests", {})
        if file.suffix == ".safetensors" and not is_hashed:
            return {"bytes": file.stat().st_size}
        return describe(file)


class _Planner:
    """Planner of one content; it completes ``document``."""

    def __init__(
        self, path: Path, token: str, marker: str, by_document: bool, key: str, document: JsonObject
    ) -> None:
        self._path, self._token, self._by_document = path, token, by_document
        self._content, self._document, self._files = key, document, document["files"]
        self._staged = path / HIDDEN / token
        self.plan = RenamePlan(marker, marker)
        #: Contents of the old document; (name, SHA-256) of each file that an old document lists.
        self._contents: dict[str, JsonObject] = {}
        self._listed: set[tuple[str, str | None]] = set()
        for name, found in _documents(path).items():
            contents = contents_of(found) if name == MARKER else {key: found}
            listed = [item for one in contents.values() for item in one["files"].items()]
            self._listed |= {(name, one.get("sha256")) for name, one in listed}
            self._contents = contents if name == marker else self._contents
        self._old: JsonObject = self._contents.get(key, {}).get("files", {})
        self._plan()

    def _plan(self) -> None:
        folders = set()
        for group, names in grouped(self._files, staged=True).items():
            staged = [name for name in names if (self._staged / name).is_file()]
            weights = [name for name in names if WEIGHTS.fullmatch(PurePosixPath(name).name)]
            if weights:
                self._plan_weights(group, weights)
                folders.add(PurePosixPath(group).parent)
            for name in staged:
                if name not in weights:
                    self._plan_companion(name)
        if self._by_document:
            self._drop(self._old, lambda group: PurePosixPath(group).parent in folders)
        new_paths = [*self.plan.before.values(), *self.plan.after, self.plan.switch]
        self.plan.folders = [name for name in _folders_of(new_paths) if not (self._path / name).exists()]
        self._document.update(self._other_contents(), content=self._content, save=self._token)

    def _plan_weights(self, group: str, names: Sequence[str]) -> None:
        plan, single = self.plan, f"{group}.safetensors"
        index = single + INDEX
        files = [name for name in names if name != index and (self._staged / name).is_file()]
        # Readers find a single file by its name, and several files through their index.
        is_single = not self._by_document and index not in names
        existing = {name for name in (*files, single, index) if self._exists(name)}
        # A new file under an old name would mix two checkpoints: add the token to its name.
        has_token = not is_single and bool(existing if self._by_document else existing & set(files))
        new_names = {name: self._add_token(name) if has_token else name for name in files}
        old = [single, index, *self._in_index(index), *self._old]
        if has_token:
            for name, new in new_names.items():
                self._files[new] = {**self._files.pop(name), "name": name}
            self._write_index(group, index, new_names)
        if is_single:
            plan.switch = single
        else:
            plan.before |= new_names
        if self._by_document:
            if index in self._files:
                # Only other libraries read the index here; zerostart reads the document.
                if self._exists(index):
                    plan.after.append(index)
                else:
                    plan.before[index] = index
        elif not is_single:
            plan.switch, plan.replaced_file = index, single if single in existing else ""
        self._drop(old, lambda found: found == group)

    def _plan_companion(self, name: str) -> None:
        """Plan to rename a companion, but replace no foreign file."""
        target = self._path / name
        if not self._exists(name):
            if _is_content(name):
                self.plan.before[name] = name
            else:
                self.plan.after.append(name)
            return
        old_digest = describe(target)["sha256"] if target.is_file() and not target.is_symlink() else ""
        if old_digest == self._files[name].get("sha256"):
            return  # keep a file with equal bytes, so that no reader sees it change
        if (name, old_digest) in self._listed or _is_content(name):
            self.plan.after.append(name)
        else:
            del self._files[name]

    def _drop(self, names: Iterable[str], matches: Callable[[str], bool]) -> None:
        """Plan to delete old weights of matching groups."""
        for name in names:
            groups = {group_of(name), group_of(name, staged=True)} - {""}
            new = name in self._files or name == self.plan.switch
            if (
                not new
                and any(map(matches, groups))
                and not _linked_parent(self._path, name)
                and self._exists(name)
            ):
                self.plan.drop.append(name)

    def _other_contents(self) -> JsonObject:
        """Return the other contents with existing weights."""
        if self.plan.marker != MARKER:
            return {}
        contents = {}
        for key, other in self._contents.items():
            files = {name: one for name, one in other["files"].items() if name not in self._files}
            weights = [name for name in files if name.endswith(".safetensors")]
            if key != self._content and any(map(self._exists, weights)):
                contents[key] = {**{n: v for n, v in other.items() if n != "others"}, "files": files}
        return {"others": contents} if contents else {}

    def _add_token(self, name: str) -> str:
        path = PurePosixPath(name)
        stem = PurePosixPath(group_of(name, staged=True)).name
        return (path.parent / f"{stem}-{self._token}{path.name.removeprefix(stem)}").as_posix()

    def _exists(self, name: str) -> bool:
        return os.path.lexists(self._path / name)

    def _write_index(self, group: str, index: str, new_names: Mapping[str, str]) -> None:
        names = {PurePosixPath(name).name: PurePosixPath(new).name for name, new in new_names.items()}
        if index in self._files:
            document = read_json(self._staged / index, "index")
            document["weight_map"] = {n: names[file] for n, file in document["weight_map"].items()}
        else:
            digests = self._document.get("digests", {}).get(PurePosixPath(group).parent.as_posix())
            if not digests or len(names) != 1:
                return
            total = sum(self._files[new]["bytes"] for new in new_names.values())
            weight_map = dict.fromkeys(digests, *names.values())
            document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        data = _write_json(self._staged / index, document, indent=2, sort_keys=True)
        self._files[index] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _in_index(self, index: str) -> list[str]:
        """Return the files that the old index lists."""
        if not (self._path / index).is_file():
            return []
        try:
            listed = read_json(self._path / index, "index").get("weight_map")
        except ZerostartError:  # a damaged index lists nothing
            return []
        values = set(listed.values()) if isinstance(listed, dict) else set()
        folder = PurePosixPath(index).parent
        return sorted((folder / value).as_posix() for value in values if is_inside(value))


def _switch(path: Path, staged: Path, plan: RenamePlan) -> None:
    for name in plan.folders:
        (path / name).mkdir(exist_ok=True)
    for name, new in plan.before.items():
        (staged / name).rename(path / new)
    for parent in {(path / new).parent for new in (*plan.before.values(), plan.switch)}:
        sync_directory(parent)
    (staged / plan.switch).replace(path / plan.switch)


def _finish(path: Path, staged: Path, plan: RenamePlan) -> None:
    """Do the remaining steps after the switch. Raises OSError."""
    if plan.replaced_file:
        (path / plan.replaced_file).unlink(missing_ok=True)
    for name in dict.fromkeys((*plan.after, *([plan.marker] if plan.marker else []))):
        if os.path.lexists(staged / name):
            (staged / name).replace(path / name)
    new_paths = (*plan.after, plan.marker, plan.switch, plan.replaced_file)
    for parent in {(path / name).parent for name in new_paths if name}:
        if parent.is_dir():
            sync_directory(parent)
    for name in plan.drop:
        if not (path / name).is_dir():
            (path / name).unlink(missing_ok=True)


def _undo(path: Path, staged: Path, plan: RenamePlan) -> None:
    """Undo the renames before the switch. Raises OSError."""
    for name, new in plan.before.items():
        if not os.path.lexists(staged / name):
            (path / new).unlink(missing_ok=True)


def _recover(path: Path, token: str = "*") -> None:
    """Complete or undo killed saves. Raises OSError.

    The caller holds the lock.
    """
    hidden = path / HIDDEN
    for file in sorted(hidden.glob(f"{token}{PLAN_SUFFIX}")):
        staged = file.with_suffix("")
        plan = _read_plan(file)
        if plan is not None and plan.is_safe(path, staged):
            # A staged switch was not renamed. Act on the plan before the folder below is deleted.
            if plan.switch and os.path.lexists(staged / plan.switch):
                _undo(path, staged, plan)
            else:
                _finish(path, staged, plan)
            for folder in sorted(plan.folders, reverse=True):
                _remove_empty(path / folder)
        file.unlink()
    for entry in sorted(hidden.glob(token)):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK_NAME:
            entry.unlink()


def clear_leftovers(path: Path) -> None:
    """Recover, and delete an empty directory.

    Does nothing while a save runs. Raises OSError.
    """
    if not (path / HIDDEN).is_dir():
        return
    with lock_directory(path, timeout=0) as held:
        if held:
            _recover(path)
    _remove_empty(path)


def finish_switched(path: Path) -> None:
    """Complete a save after its switch, or wait.

    It waits for a running save. Readers call it first. Raises CheckpointError if a config file is from
    the checkpoint before and this process cannot replace it.
    """
    if not _switched_plans(path):
        return
    # A reader without write permission: reported below.
    with contextlib.suppress(OSError, ZerostartError), lock_directory(path) as held:
        if held:
            _recover(path)
    staged = (n for f, plan in _switched_plans(path) for n in plan.after if os.path.lexists(f / n))
    if config := next(filter(_is_content, staged), None):
        raise CheckpointError(
            f"{path / config} belongs to an earlier checkpoint: the save of the weights in this "
            "directory was killed before it replaced that file, and this process cannot replace it: "
            "save again with write permission, or to another directory"
        )


def _switched_plans(path: Path) -> list[tuple[Path, RenamePlan]]:
    """Return folders and plans of unfinished, switched saves."""
    plans = ((file.with_suffix(""), _read_plan(file)) for file in (path / HIDDEN).glob(f"*{PLAN_SUFFIX}"))
    return [
        (staged, plan)
        for staged, plan in plans
        if plan is not None and plan.is_safe(path, staged) and not os.path.lexists(staged / plan.switch)
        if not (plan.replaced_file and os.path.lexists(path / plan.replaced_file))
    ]


def remove(path: Path, marker: str) -> None:
    """Delete the files of a document.

    Also delete the directory if it is empty. The document is deleted first: from then on the directory is
    no checkpoint. Raises OSError and ZerostartError.
    """
    with lock_directory(path) as held:
        if held is False:
            raise _locked_error(path)
        _recover(path)
        if (document := current(path, marker)) is not None:
            contents = contents_of(document).values() if marker == MARKER else [document]
            names = sorted({name for content in contents for name in content["files"]})
            names = [name for name in names if not _linked_parent(path, name)]
            plan = RenamePlan("", "", replaced_file=marker, drop=names, folders=_folders_of(names))
            _write_plan(path, uuid.uuid4().hex[:12], plan)
            _recover(path)
    _remove_empty(path)


def _locked_error(path: Path) -> WriteError:
    return WriteError(
        f"{path}: another process is saving to this directory; save again when it has ended, or to another "
        "directory"
    )


def _write_plan(path: Path, token: str, plan: RenamePlan) -> None:
    _write_json(path / HIDDEN / f"{token}{PLAN_SUFFIX}", dataclasses.asdict(plan))
    sync_directory(path / HIDDEN)


def _read_plan(file: Path) -> RenamePlan | None:
    try:
        return RenamePlan(**read_json(file, "plan"))
    except (ZerostartError, TypeError):  # no save wrote it
        return None


def _write_json(path: Path, document: object, indent: int | None = None, sort_keys: bool = False) -> bytes:
    text = json.dumps(document, indent=indent, sort_keys=sort_keys, ensure_ascii=False) + "\n"
    data = text.encode()
    write_whole(path, data, path.with_name(f".{path.name}.part"))
    return data


def _documents(path: Path) -> dict[str, JsonObject]:
    saved = {}
    for marker in MARKERS:
        with contextlib.suppress(VerifyError):  # a damaged document lists nothing
            if (document := current(path, marker)) is not None:
                saved[marker] = document
    return saved


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it has files or does not exist
        folder.rmdir()


def _is_content(name: str) -> bool:
    return PurePosixPath(name).name in CONTENT


def describe(path: Path) -> JsonObject:
    """Return the size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _linked_parent(path: Path, name: str) -> Path | None:
    parents = [path / parent for parent in PurePosixPath(name).parents if str(parent) != "."]
    return next((parent for parent in parents if parent.is_symlink()), None)


def _folders_of(names: Iterable[str]) -> list[str]:
    """Return all parent folders, outer ones first."""
    return sorted({parent.as_posix() for name in names for parent in PurePosixPath(name).parents} - {"."})


def _files_below(directory: Path) -> list[str]:
    paths = [path for path in directory.rglob("*") if not path.is_dir()]
    return sorted(path.relative_to(directory).as_posix() for path in paths)


@contextlib.contextmanager
def write_errors(path: Path | str, state: str) -> Iterator[None]:
    """Convert OSError to a WriteError with ``state``."""
    try:
        yield
    except ZerostartError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise WriteError(f"{path}: saving failed{where}: {error.strerror or error}; {state}") from error
