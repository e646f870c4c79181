"""Saves into a directory: new files next to old ones, and one rename that readers see.

A save writes everything into ``.zerostart/TOKEN`` of the directory, and holds the directory's lock. Then the
weights get names that no file has, and one rename publishes them: that of the index, of the single file of
weights, or of the document. After that the other files get their names, and the files go that the old index
or document lists. ``.zerostart/TOKEN.plan`` says what is renamed and deleted, so that the next save, or a
reader, finishes a killed save after its rename, and takes it back before.
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
    documents,
    group_of,
    grouped,
    is_foreign,
    is_inside,
    lies_at,
)
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import JsonObject, read_json
from zerostart.checkpoint.write.folders import LOCK_NAME, lock_directory, sync, sync_directory, write_whole
from zerostart.errors import CheckpointError, VerifyError, WriteError, ZerostartError

#: Files that say how weights are read: they always belong to the weights next to them.
CONTENT = ("config.json", "adapter_config.json")


@dataclass
class RenamePlan:
    """What one content of a save renames and deletes. All names are paths from the directory."""

    #: Document of the directory; empty for none.
    marker: str
    #: Staged file whose rename publishes the save; empty for a removal.
    switch: str
    #: File that readers prefer to ``switch``, deleted right after its rename.
    over: str = ""
    #: New names of the staged files that are renamed before the switch.
    before: dict[str, str] = field(default_factory=dict)
    #: Files that are renamed after the switch.
    after: list[str] = field(default_factory=list)
    #: Files of the old checkpoint.
    drop: list[str] = field(default_factory=list)
    #: Folders that the save makes, or that a removal empties.
    folders: list[str] = field(default_factory=list)

    def is_safe(self, path: Path) -> bool:
        """Return whether all names are below ``path``: anybody may have written the file of the plan."""
        lists = (self.after, self.drop, self.folders, list(self.before.values()), list(self.before))
        if not isinstance(self.before, dict) or not all(isinstance(one, list) for one in lists):
            return False
        names = [name for one in lists for name in one] + [n for n in (self.switch, self.over) if n != ""]
        known = self.marker in ("", *MARKERS)
        return known and all(is_inside(name) and not _linked_parent(path, name) for name in names)


class Staging:
    """A save into the directory ``path``; one process has it, and writes or leads those who do.

    Everything is written below ``directory``. Then :meth:`complete` publishes it, or :meth:`discard` removes
    it, which may be called at any time, and more than once.
    """

    def __init__(
        self, path: str | os.PathLike[str], marker: str = MARKER, by_document: bool | None = None
    ) -> None:
        """Make the directories, and recover what a killed save has left. Raises WriteError.

        ``marker`` is the name of the document, empty for none. ``by_document``: readers find the files by it,
        not by the names of weights; None: only by the one of a training state.
        """
        # Resolved once, so that all that follows is done to one directory.
        self.path = Path(os.path.realpath(expanded(path)))
        self._marker = marker
        self._by_document = marker not in (MARKER, "") if by_document is None else by_document
        self._token = uuid.uuid4().hex[:12]
        self.directory = self.path / HIDDEN / self._token
        self._made: list[Path] = []
        self._held = contextlib.ExitStack()
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
                if self._held.enter_context(lock_directory(self.path)) is False:
                    raise _busy(self.path)
                _recover(self.path)
                self.directory.mkdir()
        # Also at an interrupt: a save that has not begun must not keep the lock.
        except BaseException:
            self.discard()
            raise

    def _make_path(self) -> None:
        for place in reversed([place for place in (self.path, *self.path.parents) if not place.exists()]):
            place.mkdir(exist_ok=True)
            self._made.append(place)
            sync_directory(place.parent)

    def complete(self, document: JsonObject) -> dict[str, str]:
        """Write everything to the disk, and publish it.

        The document gets the entries of ``document``, and "files": for each file its "bytes" and, unless
        "digests" of ``document`` has the tensors of its folder, its "sha256". Entries of "files" in
        ``document`` are kept; such a file may stay where it is. Returns the final names of weights by their
        staged names. Raises WriteError; the directory is then as it was, unless the message says otherwise.
        """
        document = {SAVED_AT: time.time_ns(), **document} if self._marker == MARKER else document
        state, names = "nothing was saved, and what was there is as it was", dict[str, str]()
        with write_errors(self.path, state):
            known = document.get("files", {})
            below = _files_below(self.directory)
            for name in below:
                sync(self.directory / name)
            files = {**known, **{name: known.get(name) or self._describe(name, document) for name in below}}
        contents = {"": list(files)} if self._by_document else grouped(files, staged=True)
        # One switch for each content (a model, an adapter next to it).
        for key, of in contents.items():
            described = {**document, "format": FORMAT, "files": {name: files[name] for name in of}}
            if not self._by_document and "digests" in document:
                folders = {str(Path(name).parent) for name in of if name.endswith(".safetensors")}
                described["digests"] = {f: d for f, d in document["digests"].items() if f in folders}
            names |= self._publish(key, described, state)
            state = "a part of it was saved: save again"
        with write_errors(self.path, "all is there, but temporary files may be left: save again"):
            shutil.rmtree(self.directory, ignore_errors=True)
            self._held.close()
        return names

    def _publish(self, key: str, document: JsonObject, state: str) -> dict[str, str]:
        with write_errors(self.path, state):
            plan = _Planner(self.path, self._token, self._marker, self._by_document, key, document).plan
            for name in (plan.switch, plan.over, *plan.before.values(), *plan.after):
                if linked := _linked_parent(self.path, name):
                    raise WriteError(f"{linked} is a link, which no save follows: save to another directory")
            # The document may be the switch, whose absence from the staging folder says that it was made.
            if self._marker:
                _write_json(self.directory / self._marker, document, indent=1)
            _write_plan(self.path, self._token, plan)
            _switch(self.path, self.directory, plan)
        with write_errors(self.path, "all is there, but may be lost if the machine stops now: save again"):
            _finish(self.path, self.directory, plan)
            (self.path / HIDDEN / f"{self._token}{PLAN_SUFFIX}").unlink()
        return plan.before

    def discard(self) -> None:
        """Remove what is not published; a save that has made its switch is finished."""
        # The error that led here is reported; what cannot be removed now goes with the next save.
        with contextlib.suppress(OSError, ZerostartError), self._held:
            if self.directory.parent.is_dir():
                _recover(self.path, self._token)
        for place in reversed(self._made):
            _remove_empty(place)

    def _describe(self, name: str, document: JsonObject) -> JsonObject:
        """Return the length of a file, and a hash unless its tensors have digests."""
        file = self.directory / name
        described: JsonObject = {"bytes": file.stat().st_size}
        weights = file.suffix == ".safetensors"
        if not weights or (self._marker and str(Path(name).parent) not in document.get("digests", {})):
            described["sha256"] = _sha256(file)
        return described


class _Planner:
    """Plans one content of a save; its document becomes the one that is published."""

    def __init__(
        self, path: Path, token: str, marker: str, by_document: bool, key: str, document: JsonObject
    ) -> None:
        self._path, self._token, self._by_document = path, token, by_document
        self._key, self._document, self._files = key, document, document["files"]
        self._staged = path / HIDDEN / token
        self.plan = RenamePlan(marker, marker)
        #: Contents of the document before, and the files that any document lists, with their hashes.
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
            if "cache" in self._document:  # found in the staging folder until they have their names
                self.plan.after += staged
                continue
            weights = [name for name in names if WEIGHTS.fullmatch(PurePosixPath(name).name)]
            if weights:
                self._plan_weights(group, weights)
                folders.add(PurePosixPath(group).parent)
            for name in staged:
                if name not in weights:
                    self._plan_companion(name)
        if self._by_document:
            cache = "cache" in self._document and "cache" in self._contents.get(self._key, {})
            self._drop(self._old, lambda group: cache or PurePosixPath(group).parent in folders)
        named = [*self.plan.before.values(), *self.plan.after, self.plan.switch]
        self.plan.folders = [name for name in _folders_of(named) if not (self._path / name).exists()]
        self._document.update(self._others(), content=self._key, save=self._token)

    def _plan_weights(self, group: str, names: Sequence[str]) -> None:
        plan, single = self.plan, f"{group}.safetensors"
        index = single + INDEX
        files = [name for name in names if name != index and (self._staged / name).is_file()]
        # Readers find a single file by its name, several by their index.
        alone = not self._by_document and index not in names
        taken = {name for name in (*files, single, index) if self._exists(name)}
        # New files under old names would mix two checkpoints for a reader: they get the token.
        tagged = not alone and bool(taken if self._by_document else taken & set(files))
        called = {name: self._tag(name) if tagged else name for name in files}
        old = [single, index, *self._in_index(index), *self._old]
        if tagged:
            for name, new in called.items():
                self._files[new] = {**self._files.pop(name), "name": name}
            self._write_index(group, index, called)
        if alone:
            plan.switch = single
        else:
            plan.before |= called
        if self._by_document:
            if index in self._files:
                # For other libraries; ours go by the document.
                if self._exists(index):
                    plan.after.append(index)
                else:
                    plan.before[index] = index
        elif not alone:
            plan.switch, plan.over = index, single if single in taken else ""
        self._drop(old, lambda found: found == group)

    def _plan_companion(self, name: str) -> None:
        """Rename a file that is no weights, unless a stranger's file has its name."""
        there = self._path / name
        if not self._exists(name):
            if _is_content(name):
                self.plan.before[name] = name
            else:
                self.plan.after.append(name)
            return
        found = _sha256(there) if there.is_file() and not there.is_symlink() else ""
        if found == self._files[name].get("sha256"):
            return  # equal bytes are not written again, so that no reader sees a file change
        if (name, found) in self._listed or _is_content(name):
            self.plan.after.append(name)
        else:
            del self._files[name]

    def _drop(self, names: Iterable[str], of: Callable[[str], bool]) -> None:
        """Delete old files of weights; their names are read with and without the token."""
        for name in names:
            groups = {group_of(name), group_of(name, staged=True)} - {""}
            new = name in self._files or name == self.plan.switch
            if (
                not new
                and any(map(of, groups))
                and not _linked_parent(self._path, name)
                and self._exists(name)
            ):
                self.plan.drop.append(name)

    def _others(self) -> JsonObject:
        """Return the contents of the document that stay."""
        if self.plan.marker != MARKER:
            return {}
        others = {}
        for key, other in self._contents.items():
            files = {name: one for name, one in other["files"].items() if name not in self._files}
            weights = [name for name in files if name.endswith(".safetensors")]
            if key != self._key and any(map(self._exists, weights)):
                others[key] = {**{n: v for n, v in other.items() if n != "others"}, "files": files}
        return {"others": others} if others else {}

    def _tag(self, name: str) -> str:
        path = PurePosixPath(name)
        stem = PurePosixPath(group_of(name, staged=True)).name
        return (path.parent / f"{stem}-{self._token}{path.name.removeprefix(stem)}").as_posix()

    def _exists(self, name: str) -> bool:
        return os.path.lexists(self._path / name)

    def _write_index(self, group: str, index: str, called: Mapping[str, str]) -> None:
        names = {PurePosixPath(name).name: PurePosixPath(new).name for name, new in called.items()}
        if index in self._files:
            document = read_json(self._staged / index, "index")
            document["weight_map"] = {n: names[file] for n, file in document["weight_map"].items()}
        else:
            digests = self._document.get("digests", {}).get(PurePosixPath(group).parent.as_posix())
            if not digests or len(names) != 1:
                return
            total = sum(self._files[new]["bytes"] for new in called.values())
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
    """Do what is left after the switch; each step may have been done before a kill. Raises OSError."""
    if plan.over:
        (path / plan.over).unlink(missing_ok=True)
    for name in dict.fromkeys((*plan.after, *([plan.marker] if plan.marker else []))):
        if os.path.lexists(staged / name):
            (staged / name).replace(path / name)
    named = (*plan.after, plan.marker, plan.switch, plan.over)
    for parent in {(path / name).parent for name in named if name}:
        if parent.is_dir():
            sync_directory(parent)
    for name in plan.drop:
        if not (path / name).is_dir():
            (path / name).unlink(missing_ok=True)


def _undo(path: Path, staged: Path, plan: RenamePlan) -> None:
    """Delete the files that a save had renamed before its switch. Raises OSError."""
    for name, new in plan.before.items():
        if not os.path.lexists(staged / name):
            (path / new).unlink(missing_ok=True)


def _recover(path: Path, token: str = "*") -> None:
    """Finish or undo killed saves, and remove their files; under the lock. Raises OSError."""
    hidden = path / HIDDEN
    for file in sorted(hidden.glob(f"{token}{PLAN_SUFFIX}")):
        staged = file.with_suffix("")
        plan = _read_plan(file)
        if plan is not None and plan.is_safe(path):
            # The switch moves the staged file. The plan goes before the folder, whose removal takes it too.
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
    """Recover a killed save into ``path``, and remove the directory if nothing is left; not during a save.

    Raises OSError.
    """
    if not (path / HIDDEN).is_dir():
        return
    with lock_directory(path, timeout=0) as held:
        if held:
            _recover(path)
    _remove_empty(path)


def finish_switched(path: Path) -> None:
    """Before a reader: finish a save that was killed after its switch, or wait for a live one.

    Raises CheckpointError if a configuration is that of the checkpoint before, and cannot be replaced here.
    """
    if not os.path.lexists(path / HIDDEN) or not _unnamed(path):
        return
    # What a reader may not change is reported below.
    with contextlib.suppress(OSError, ZerostartError), lock_directory(path) as held:
        if held:
            _recover(path)
    if left := _unnamed(path):
        raise CheckpointError(
            f"{path / left[0]} belongs to an earlier checkpoint: the save of the weights in this "
            "directory was killed before it replaced that file, and this process may not replace it; "
            "save again where it may, or save to another directory"
        )


def _unnamed(path: Path) -> list[str]:
    """Return the configurations of published weights that are still in a staging folder."""
    try:
        found = documents(path)
    except VerifyError:
        return []
    names = [(document, name) for document in found for name in document["files"] if _is_content(name)]
    return [name for document, name in names if lies_at(path, document, name) != path / name]


def remove(path: Path, marker: str) -> None:
    """Delete the files that the document ``marker`` of a directory lists, and the directory if it is empty.

    From the first deletion on it is no checkpoint. Raises OSError and ZerostartError.
    """
    with lock_directory(path) as held:
        if held is False:
            raise _busy(path)
        _recover(path)
        if (document := current(path, marker)) is not None:
            contents = contents_of(document).values() if marker == MARKER else [document]
            names = sorted({name for content in contents for name in content["files"]})
            names = [name for name in names if not _linked_parent(path, name)]
            plan = RenamePlan("", "", over=marker, drop=names, folders=_folders_of(names))
            _write_plan(path, uuid.uuid4().hex[:12], plan)
            _recover(path)
    _remove_empty(path)


def _busy(path: Path) -> WriteError:
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
    except (ZerostartError, TypeError):  # not written by a save
        return None


def _write_json(path: Path, document: object, indent: int | None = None, sort_keys: bool = False) -> bytes:
    text = json.dumps(document, indent=indent, sort_keys=sort_keys, ensure_ascii=False) + "\n"
    data = text.encode()
    write_whole(path, data, path.with_name(f".{path.name}.part"))
    return data


def _documents(path: Path) -> dict[str, JsonObject]:
    found = {}
    for marker in MARKERS:
        with contextlib.suppress(VerifyError):  # a damaged document lists nothing
            if (document := current(path, marker)) is not None:
                found[marker] = document
    return found


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it has files, or is gone
        folder.rmdir()


def _is_content(name: str) -> bool:
    return PurePosixPath(name).name in CONTENT


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _linked_parent(path: Path, name: str) -> Path | None:
    parents = [path / parent for parent in PurePosixPath(name).parents if str(parent) != "."]
    return next((parent for parent in parents if parent.is_symlink()), None)


def _folders_of(names: Iterable[str]) -> list[str]:
    """Return all folders of files, outer ones first."""
    return sorted({parent.as_posix() for name in names for parent in PurePosixPath(name).parents} - {"."})


def _files_below(directory: Path) -> list[str]:
    found = [path for path in directory.rglob("*") if not path.is_dir()]
    return sorted(path.relative_to(directory).as_posix() for path in found)


@contextlib.contextmanager
def write_errors(path: Path | str, state: str) -> Iterator[None]:
    """Raise an error of the system as a WriteError that says what it means for the directory."""
    try:
        yield
    except ZerostartError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise WriteError(f"{path}: saving failed{where}: {error.strerror or error}; {state}") from error
