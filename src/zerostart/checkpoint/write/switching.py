"""From the files of one content, as a save has staged them, to their names: what is done, in which order;

and finishing, or taking back, what a save had done of that when it was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.manifest import (
    HIDDEN,
    INDEX,
    MARKER,
    MARKERS,
    WEIGHTS,
    contents_of,
    current,
    documents,
    group_of,
    grouped,
    is_inside,
    lies_at,
)
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, read_json
from zerostart.checkpoint.write.folders import Folder, Identity, lock, write_whole
from zerostart.errors import CheckpointError, VerifyError, ZerostartError

#: What says how weights are to be read, and is theirs; other files beside them may be a script's own.
CONTENT = ("config.json", "adapter_config.json")
_LOCK = re.compile(r"(?P<token>[0-9a-f]{12})\.lock")
#: A list of more bytes is none that a save has written.
_MOST = 100 << 20
#: Most directories beside a place that are looked at for what killed saves have left.
_NEIGHBOURS = 10_000


@dataclass
class Plan:
    """What one content does to the names in a directory. All are paths there, with slashes.

    ``switch`` is the staged file by which readers go from then on, ``over`` the single file that has to be
    gone for that. ``puts`` are weights, staged and new names; ``made`` has what tells these, ``drop`` what
    tells the old ones. ``deliver`` is what gets its name after the switch: where nothing is (None), or in the
    place of what is told so; what is also ``made`` gets it before, so that no weights are there without their
    configuration, and no state without the index of its model. ``folders`` go where nothing is in them.
    """

    marker: str
    switch: str
    over: str = ""
    puts: dict[str, str] = field(default_factory=dict)
    made: dict[str, Identity] = field(default_factory=dict)
    deliver: dict[str, Identity | None] = field(default_factory=dict)
    drop: dict[str, Identity] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    def is_safe(self) -> bool:
        """Whether a save may have noted it: anybody may have, and what is done by it is done to files.

        All names are below the directory, and none loses its file, or gets another, but where that is told.
        """
        tables = (self.made, self.deliver, self.drop)
        if not all(isinstance(table, dict) for table in tables) or not isinstance(self.folders, list):
            return False
        names = [*self.made, *self.deliver, *self.drop, *self.folders]
        names += [name for name in (self.switch, self.over) if name != ""]
        known = [one for table in tables for one in table.values() if one is not None]
        told = None not in (*self.made.values(), *self.drop.values()) and all(map(_is_identity, known))
        return told and all(map(is_inside, names)) and self.marker in (("",) if self.switch else ()) + MARKERS


def _is_identity(known: object) -> bool:
    return isinstance(known, list) and len(known) == 3 and all(type(one) is int for one in known)


def planned(
    folder: Folder, token: str, marker: str, by_document: bool, key: str, document: JsonObject
) -> Plan:
    """Plan the content ``key``, whose staged files ``document`` describes; it becomes what will be there.

    ``by_document``: readers go by the document (of a training state, of a cache), which says what the files
    are called; else by the index of the weights, or by their single file. Raises OSError.
    """
    # The document is the switch until the weights of a group turn out to have one of their own.
    planner = _Planner(folder, token, Plan(marker, marker), by_document, key, document)
    for group, names in grouped(planner.files, staged=True).items():
        if "cache" in document:
            planner.replace_all(names)
            continue
        # Weights first: which names are taken, and what goes for them, settles what readers go by.
        weights = [name for name in names if WEIGHTS.fullmatch(PurePosixPath(name).name)]
        if weights:
            planner.name_weights(group, weights)
        for name in names:
            if name not in weights and planner.staged(name).is_file():
                planner.name_companion(name)
    if by_document:
        planner.drop_listed()
    # "save" and "switch" are what a reader finds a save by that was killed after its switch: while its
    # document is still staged, the absence of the staged switch says that it counts.
    document.update(planner.beside(), content=key, save=token, switch=planner.plan.switch)
    if planner.plan.over:
        document["over"] = planner.plan.over
    return planner.plan


class _Planner:
    def __init__(
        self, folder: Folder, token: str, plan: Plan, by_document: bool, key: str, document: JsonObject
    ) -> None:
        self.plan, self.files = plan, document["files"]
        self._folder, self._token, self._key, self._document = folder, token, key, document
        self._by_document = by_document
        self._known: list[JsonObject] = []
        self._before: dict[str, JsonObject] = {}
        self._groups: set[str] = set()
        for name in MARKERS:
            # Both documents: a file that either of them lists is ours to replace.
            with contextlib.suppress(ZerostartError):  # a damaged one says nothing
                top = current(folder.path, name)
                if top is not None:
                    contents = contents_of(top) if name == MARKER else {key: top}
                    self._known += contents.values()
                    self._before = contents if name == plan.marker else self._before
        self._old = self._before.get(key, {}).get("files", {})

    def staged(self, name: str) -> Path:
        return self._folder.path / HIDDEN / self._token / name

    def name_weights(self, group: str, names: Sequence[str]) -> None:
        """Give weights of one folder and stem free names, and find those that they take the place of."""
        single = f"{group}.safetensors"
        index = single + INDEX
        files = [name for name in names if name != index and self.staged(name).is_file()]
        # A single file needs no other switch than its own rename; several have their index for it.
        alone = not self._by_document and index not in names
        taken = {name for name in (*files, single, index) if self._folder.identity(name) is not None}
        # A name that is taken would mix old and new shards for whoever reads meanwhile: then all new ones
        # have the token in their names, and the index, or the document, leads to them.
        tagged = not alone and bool(taken if self._by_document else taken & set(files))
        called = {name: self._tagged(name) if tagged else name for name in files}
        if alone:
            self.plan.switch = single
        else:
            self.plan.puts |= called
            self.plan.made |= {new: self._identity(name) for name, new in called.items()}
        # The document lists a file by the name that it will have; "name" keeps the one that it was staged
        # under.
        for name, new in called.items() if tagged else ():
            self.files[new] = {**self.files.pop(name), "name": name}
        if tagged:
            # Before identities are asked for below: this replaces the staged index.
            self._write_index(group, index, called)
        if self._by_document:
            self._groups.add(group)
            if index in self.files:
                # After the document the index says the same to others, in the place of what they read before.
                self.plan.deliver = {index: self._folder.identity(index), **self.plan.deliver}
                if self.plan.deliver[index] is None:
                    self.plan.made[index] = self._identity(index)
                for name in (single, *self._in_index(index)):
                    self._drop(name, {group}, (single, index))
            return
        if not alone:
            self.plan.switch, self.plan.over = index, single if single in taken else ""
        listed = [index if alone else single, *self._in_index(index), *self._old]
        for name in listed:
            self._drop(name, {group}, (single, index))

    def name_companion(self, name: str) -> None:
        """Have a file that is no weights get its name, unless what has that is somebody's own."""
        there, same = self._folder.identity(name), False
        if there is not None:
            found = self._folder.sha256(name)
            same = found is not None and found == self.files[name].get("sha256")
            ours = any(one["files"].get(name, {}).get("sha256", "") == found for one in self._known)
            # Somebody's own file (a README of the script, say) stays, and this save has none of that name. A
            # configuration is replaced even so: weights would be read by another one's.
            if not ours and not _is_content(name):
                del self.files[name]
                return
        # Bytes that are there already are not written again, so that nobody sees the file change.
        if not same:
            self.plan.deliver[name] = there
        if there is None and _is_content(name):
            self.plan.made[name] = self._identity(name)

    def replace_all(self, names: Sequence[str]) -> None:
        """Have files of a cache get their names after its document, by which they are found until then."""
        there = {name: self._folder.identity(name) for name in names if self.staged(name).is_file()}
        self.plan.deliver |= there

    def drop_listed(self) -> None:
        """Have the weights go that the document before this one lists, in its folders."""
        folders = {PurePosixPath(group).parent for group in self._groups}
        groups = {group for group in grouped(self._old) if PurePosixPath(group).parent in folders}
        if "cache" in self._document and "cache" in self._before.get(self._key, {}):
            groups = set(grouped(self._old))
        for name in self._old:
            self._drop(name, groups)

    def beside(self) -> JsonObject:
        """What else there is to say of the directory: the contents that stay, as far as they are there."""
        if self.plan.marker != MARKER:
            return {}
        others = {}
        # Names that this save has taken over are no longer the other content's; one without any weights left
        # is gone.
        for key, other in self._before.items():
            files = {name: one for name, one in other["files"].items() if name not in self.files}
            weights = [name for name in files if name.endswith(".safetensors")]
            if key != self._key and any(self._folder.identity(name) for name in weights):
                others[key] = {n: v for n, v in other.items() if n not in ("others", "switch", "over")}
                others[key]["files"] = files
        return {"others": others} if others else {}

    def _tagged(self, name: str) -> str:
        path = PurePosixPath(name)
        stem = PurePosixPath(group_of(name, staged=True)).name
        return (path.parent / f"{stem}-{self._token}{path.name.removeprefix(stem)}").as_posix()

    def _identity(self, name: str) -> Identity:
        found = self._folder.identity(f"{HIDDEN}/{self._token}/{name}")
        assert found is not None, "what is staged"
        return found

    def _write_index(self, group: str, index: str, called: Mapping[str, str]) -> None:
        """The index with the names that files really have; also of one file, whose own name was taken."""
        names = {PurePosixPath(name).name: PurePosixPath(new).name for name, new in called.items()}
        if index in self.files:
            document = read_json(self.staged(index), "index")
            document["weight_map"] = {n: names[file] for n, file in document["weight_map"].items()}
        else:
            digests = self._document.get("digests", {}).get(PurePosixPath(group).parent.as_posix())
            if not digests or len(names) != 1:
                return
            total = sum(self.files[new]["bytes"] for new in called.values())
            document = {
                "metadata": {"total_size": total},
                "weight_map": dict.fromkeys(digests, *names.values()),
            }
        data = (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        part = self.staged(index).with_name(f".{PurePosixPath(index).name}.part")
        write_whole(self.staged(index), data, part)
        self.files[index] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _in_index(self, index: str) -> list[str]:
        """What the index that is there lists."""
        if self._folder.identity(index, regular=True) is None:
            return []
        with contextlib.suppress(ZerostartError):
            listed = read_json(self._folder.path / index, "index").get("weight_map")
            values = set(listed.values()) if isinstance(listed, dict) else set()
            folder = PurePosixPath(index).parent
            return sorted((folder / value).as_posix() for value in values if is_inside(value))
        return []

    def _drop(self, name: str, groups: set[str], links: Sequence[str] = ()) -> None:
        """Note a file of weights that were there before; those that readers go by may be ``links``, too."""
        # Both readings of a name: a shard of another stem may look like a tagged one of this.
        if name in self.files or not {group_of(name), group_of(name, staged=True)} & groups:
            return
        there = self._folder.identity(name, regular=True, link=name in links)
        # What the switch replaces goes by itself.
        if name != self.plan.switch and there is not None:
            self.plan.drop[name] = there


def switch(folder: Folder, staged: str, plan: Plan) -> None:
    """Give weights their names, and make the one step that readers see. Raises OSError."""
    # 1. Weights get names that nothing has: nobody reads by these yet, and `put` never replaces.
    for name, new in plan.puts.items():
        folder.put(staged + name, new)
    # 2. What has to be there with the weights, and is not.
    for name in reversed([name for name in plan.deliver if name in plan.made]):  # the index last
        with contextlib.suppress(FileExistsError):  # somebody has just put something there
            folder.put(staged + name, name)
    # 3. All these names are on the disk before the switch is: after a power cut the index leads to files.
    for new in {PurePosixPath(new).parent: new for new in (*plan.puts.values(), plan.switch)}.values():
        folder.sync(new)
    # 4. The switch: one rename, before which readers have all of the old, and after which all of the new.
    folder.replace(staged + plan.switch, plan.switch)


def finish(folder: Folder, staged: str, plan: Plan, copied: bool = False) -> None:
    """What is left to do after the switch; also what a killed save has left to do of it. Raises OSError.

    In a directory that was ``copied`` since, no file is the one that it was. Then a configuration or an index
    is taken for the one before where it has its length: else it would be read with other weights, silently.
    """
    # Readers prefer a single file to an index: as long as it is there the old weights count.
    if plan.over and plan.over in plan.drop:
        folder.remove(plan.over, plan.drop[plan.over])
    if plan.switch:
        folder.sync(plan.switch)
    lost = []
    for name, known in plan.deliver.items():
        # Every step may have been done by the save before it was killed: what is no longer staged has been
        # delivered.
        there, own = folder.identity(name), folder.identity(staged + name)
        if own is None:
            continue
        with contextlib.suppress(FileExistsError):
            if there == own:  # killed between the two names
                folder.remove(staged + name)
            elif there is None and known is None:
                folder.put(staged + name, name)
            # Replaced is only what was there when the save was planned, an empty file that `put` reserved for
            # it, or (in a copied directory, where inodes and times are others) a configuration of the same
            # length.
            elif (
                there == known
                or (known is None and folder.is_reserved(name))
                or (
                    copied
                    and there
                    and known
                    and there[1] == known[1]
                    and (_is_content(name) or name.endswith(INDEX))
                )
            ):
                folder.replace(staged + name, name)
        if folder.identity(name) != own:  # somebody has just put something there
            lost.append(name)
    for folders in {PurePosixPath(name).parent: name for name in plan.deliver}.values():
        folder.sync(folders)
    # First, for what follows may fail: an old file that cannot be removed is none of the new ones.
    _describe(folder, staged, plan.marker, lost)
    for name, known in plan.drop.items():
        folder.remove(name, known)


def _is_content(name: str) -> bool:
    return PurePosixPath(name).name in CONTENT


def _is_switched(folder: Folder, staged: str, plan: Plan) -> bool:
    # The switch moves the staged file: as long as it lies there, nothing has been switched.
    if folder.identity(staged + plan.switch if plan.switch else plan.marker) is not None:
        return False
    # Nobody but the save takes it away. A staged document, though, is removed last of all by a clean-up, too:
    # there the document in place has to say whose it is.
    if plan.switch != plan.marker:
        return True
    with contextlib.suppress(ZerostartError):
        return PurePosixPath(staged).name == (current(folder.path, plan.marker) or {}).get("save")
    return False


def settle(folder: Folder, staged: str, plan: Plan, copied: bool = False) -> bool:
    """Finish what has made its switch, take back what has not; gives whether it has. Raises OSError.

    What was ``copied`` keeps its single file: nobody can tell any more whose that is, and readers go by it.
    """
    single = copied and plan.over != "" and folder.identity(plan.over) is not None
    done = not single and _is_switched(folder, staged, plan)
    if done:
        finish(folder, staged, plan, copied)
    else:
        named: set[str] = set()
        with contextlib.suppress(ZerostartError):
            # Another save may have taken the same file over since: what a document names stays.
            named = {name for document in documents(folder.path) for name in document["files"]}
        for name, known in plan.made.items():
            if name not in named:
                folder.remove(name, None if folder.is_reserved(name) else known)
    # Inner ones first, of which only those go that are empty.
    for name in sorted(plan.folders, reverse=True):
        folder.remove_empty(name)
    return done


def _describe(folder: Folder, staged: str, marker: str, lost: Sequence[str]) -> None:
    """Give the document its name, without what was lost to somebody else's files."""
    if not marker:
        return
    there = folder.identity(staged + marker) is not None
    path, document = folder.path / (staged + marker if there else marker), None
    with contextlib.suppress(ZerostartError):
        document = read_json(path, "document", MAX_DOCUMENT_BYTES) if lost else None
    if document is not None and isinstance(document.get("files"), dict):
        document["files"] = {name: one for name, one in document["files"].items() if name not in lost}
        data = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
        write_whole(folder.path / (staged + marker), data, folder.path / f"{staged}.{marker}.part")
        there = True
    if there:
        folder.replace(staged + marker, marker)
        folder.sync(marker)


def clean_up(folder: Folder, token: str, handle: int, plan: Plan | None, copied: bool = False) -> None:
    """Finish a save, or take it back; then remove what it has written besides, its lock last."""
    if plan is not None:
        settle(folder, f"{HIDDEN}/{token}/", plan, copied)
        # What goes now tells no more how far it had come.
        os.ftruncate(handle, os.pread(handle, _MOST, 0).find(b"\n") + 1)
    for marker in MARKERS:  # first: what they describe may not be there any more
        folder.remove(f"{HIDDEN}/{token}/{marker}")
    # By a handle of the parent: a link that somebody has put into the path meanwhile is not followed.
    with folder.parent(f"{HIDDEN}/{token}") as (parent, last):
        shutil.rmtree(last, ignore_errors=True, dir_fd=parent)
    # The lock goes last: while it is there, others know what is left and whose it was.
    if folder.identity(f"{HIDDEN}/{token}") is None:  # else whoever saves next removes it
        folder.remove(f"{HIDDEN}/{token}.lock")
        folder.remove_empty(HIDDEN)


def clear_killed(path: Path) -> None:
    """Settle what killed saves have left in ``path`` and the directories beside it, as far as that can be."""
    with contextlib.suppress(OSError):
        with os.scandir(path.parent) as entries:
            beside = [Path(entry) for entry, _ in zip(entries, range(_NEIGHBOURS), strict=False)]
        # Beside too: a run saves to checkpoint-1, checkpoint-2, ..., and may never come back to the one that
        # was cut.
        for place in {path, *beside}:
            with contextlib.suppress(OSError, ZerostartError):
                if os.path.lexists(place / HIDDEN):
                    _clear_one(Folder(place, follow=False))


def finish_switched(path: Path) -> None:
    """Before a reader: finish what a save had left to do in ``path`` when it was killed after its switch.

    That a save is about to do so by itself is waited for. Raises CheckpointError where a configuration is
    still that of the checkpoint before, and cannot be replaced from here.
    """
    if not os.path.lexists(path / HIDDEN) or not _unnamed(path):
        return
    with contextlib.suppress(OSError, ZerostartError):
        _clear_one(Folder(path), wait=True)
    if left := _unnamed(path):
        raise CheckpointError(
            f"{path / left[0]} belongs to an earlier checkpoint: the save of the weights in this "
            "directory was killed before it replaced that file, and this process may not replace it; "
            "save again where it may, or save to another directory"
        )


def _unnamed(path: Path) -> list[str]:
    """What says how weights are to be read that are there already, and lies with the save still."""
    with contextlib.suppress(VerifyError):
        return [
            name
            for document in documents(path)
            for name in document["files"]
            if PurePosixPath(name).name in CONTENT and lies_at(path, document, name) != path / name
        ]
    return []


def _clear_one(folder: Folder, wait: bool = False) -> None:
    made = False
    with contextlib.closing(folder), folder.alone(wait) as mine:
        found = folder.path.stat()
        for entry in sorted((folder.path / HIDDEN).iterdir()) if mine else ():
            if not (match := _LOCK.fullmatch(entry.name)):
                continue
            with folder.parent(f"{HIDDEN}/{entry.name}") as (parent, last):
                handle = os.open(
                    last, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent
                )
            try:
                lines = _lines(handle)
                if _is_free(handle, lines):
                    made = made or bool(lines and lines[0].get("new"))
                    # A copy of the directory has another lock file than the one that the save noted: its
                    # plan's identities are those of the original.
                    inode = os.fstat(handle).st_ino
                    copied = bool(lines) and lines[0].get("inode", inode) != inode
                    clean_up(folder, match["token"], handle, _noted(lines), copied)
            finally:
                os.close(handle)
        folder.remove_empty(HIDDEN)
        if mine and not os.path.lexists(
            folder.path / HIDDEN
        ):  # what a save has left has gone, and the directory is as old as it was
            # Scripts that keep the newest checkpoints go by this time.
            os.utime(folder.path, ns=(found.st_atime_ns, found.st_mtime_ns))
    if made:
        with contextlib.suppress(OSError):
            folder.path.rmdir()


def _lines(handle: int) -> list[JsonObject]:
    """What a save has noted in its lock first, and last; a line that a kill has cut off is none."""
    raw = os.pread(handle, _MOST, 0)
    end = raw.rfind(b"\n")
    begin = raw.rfind(b"\n", 0, max(end, 0)) + 1
    texts = [raw[: raw.find(b"\n")], raw[begin:end]] if begin else [raw[: max(end, 0)]]
    with contextlib.suppress(ValueError, RecursionError):
        lines = [json.loads(text.decode("utf-8", "replace")) for text in texts]
        return lines if all(isinstance(line, dict) for line in lines) else []
    return []


def _noted(lines: list[JsonObject]) -> Plan | None:
    """What the save was doing last, having done all before it."""
    with contextlib.suppress(TypeError, AttributeError):
        plan = Plan(**lines[-1]) if len(lines) > 1 else None
        return plan if plan is not None and plan.is_safe() else None
    return None


def _is_free(handle: int, lines: list[JsonObject]) -> bool:
    """Whether the process of a lock is no more; where a file system has no locks, as far as can be told."""
    # The system lets go of a lock when its process ends, however it ends.
    if (locked := lock(handle)) is not None:
        return locked
    if not lines or lines[0].get("host") != socket.gethostname():
        return False
    try:
        # Signal 0 does nothing but ask whether the process exists; on another host that cannot be asked.
        os.kill(int(lines[0]["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return False
