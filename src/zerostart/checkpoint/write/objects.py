"""Saves into a directory of a store that others may use, too: new objects, and one step to them.

An object appears whole, by the request that completes it. So weights are uploaded under names that nothing
has, and one request makes readers go by them (the switch): that which makes the index, or the document of a
training state, or completes the single file of weights; where an index takes over from a single file, the
removal of that. Then what belongs beside them takes the place of what was there, and the old weights go.

What a save leaves there while it lasts, so that killed ones are cleared away, ``notes.py`` says. Saves to one
place at the same time upload to other names than each other, and plan and publish one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.manifest import (
    FORMAT,
    HIDDEN,
    INDEX,
    MARKER,
    SAVED_AT,
    contents_of,
    group_of,
    grouped,
    is_inside,
)
from zerostart.checkpoint.storage.uploads import GoneError, Stored, TakenError, Uploads, part_bytes
from zerostart.checkpoint.strict_json import JsonObject, load_json
from zerostart.checkpoint.write.notes import (
    LEASE,
    STAYS,
    Note,
    Plan,
    clear_killed,
    clear_one,
    document_of,
    documents_of,
    finish,
    living,
    named_by,
    remove_known,
    store_errors,
    together,
    wanted,
)
from zerostart.checkpoint.write.parts import Receipts, Uploading
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.switching import CONTENT
from zerostart.errors import WriteError, ZerostartError


@dataclass
class _Group:
    """Weights of one folder and stem: names in the layout, and those that they get."""

    layout: SaveLayout
    called: dict[str, str]
    files: list[Uploading]
    #: One file that readers find by its own name, which is completed by the switch.
    alone: bool
    receipts: Receipts = field(default_factory=dict)


class ObjectStaging:
    """A save into a directory of a store; one process has it, and leads those who upload.

    Small files are written below ``directory``, which is this machine's; weights are uploaded between
    ``begin_files`` and ``end_files``. Then :meth:`complete` gives all their names, or :meth:`discard` removes
    what was uploaded, which may be called at any time, and more than once.
    """

    def __init__(self, uploads: Uploads, marker: str = MARKER, by_document: bool | None = None) -> None:
        """Leave the note, after settling what killed saves have left. Raises WriteError.

        ``marker`` and ``by_document`` are those of ``Staging``.
        """
        self._token = uuid.uuid4().hex[:12]
        self.uploads = uploads = uploads.aside(f"{HIDDEN}/{self._token}")
        self._marker = marker
        self._by_document = marker not in (MARKER, "") if by_document is None else by_document
        self._groups: dict[str, _Group] = {}
        self._kept = tempfile.TemporaryDirectory(prefix="zerostart-save-")
        self.directory = Path(self._kept.name)
        self._note = Note(uploads, self._token)
        self._open = True
        try:
            if marker and (found := uploads.read(marker)) is not None and document_of(found[0]) is None:
                raise WriteError(
                    f"{uploads.url}/{marker} was not written by zerostart, and this save would replace it: "
                    "rename it, or save to another directory"
                )
            self._note.begin()
            now = self._note.since()
            clear_killed(uploads, self._token, now)
            self._there = uploads.listed()
        except BaseException:
            self.discard()
            raise

    def begin_files(self, folder: str, layout: SaveLayout) -> list[Uploading]:
        """Choose the names of the files of ``layout`` in ``folder`` (a path from here), and begin to upload.

        Raises WriteError.
        """
        begin = "" if folder == "." else f"{folder}/"
        (self.directory / folder).mkdir(parents=True, exist_ok=True)
        names = [begin + file.name for file in layout.files]
        group = begin + layout.stem
        single = f"{group}.safetensors"
        # A single file needs no other switch than its own completion; several have their index for it.
        alone = not self._by_document and layout.index is None
        taken = {name for name in (*names, single, single + INDEX) if name in self._there}
        tagged = not alone and bool(taken if self._by_document else taken & set(names))
        of = {name: file.size for name, file in zip(names, layout.files, strict=True)}
        called, sizes = dict(zip(names, names, strict=True)), of
        # One that is completed by the switch is not there before: what lies under its name is the old one.
        with store_errors(self.uploads.url):
            self._note.write(files={**self._note.files, **(dict.fromkeys(of, STAYS) if alone else of)})
            # Noted before it is looked at: of two that want the same names at once one sees the other at
            # least.
            tagged = tagged or (not alone and any(of.keys() & wanted(note) for note in self._others()))
            if tagged:
                called = {name: self._tagged(name, group) for name in names}
                sizes = {called[name]: size for name, size in of.items()}
                kept = {name: size for name, size in self._note.files.items() if name not in of}
                self._note.write(files={**kept, **sizes})
        shared = self.uploads.shared
        # What one process uploads is there when it has all its parts: the switch gives it its name.
        keys = [f"{HIDDEN}/{self._token}/{name}" if alone and not shared else name for name in sizes]
        ids = [self._token] * len(keys)
        if shared:
            ids = together([functools.partial(self.uploads.begin, key, self._token) for key in keys])
            with store_errors(self.uploads.url):
                self._note.write(begun=[*self._note.begun, *ids])
        files = [Uploading(key, one) for key, one in zip(keys, ids, strict=True)]
        self._groups[group] = _Group(layout, called, files, alone)
        return files

    def end_files(self, folder: str, layout: SaveLayout, receipts: Receipts) -> None:
        """Complete the files of ``begin_files``, but a single one by which readers go. Raises WriteError."""
        begin = "" if folder == "." else f"{folder}/"
        group = self._groups[begin + layout.stem]
        group.receipts = dict(receipts)
        if not group.alone and self.uploads.shared:
            calls = [
                functools.partial(self._complete, group, number, None) for number in range(len(group.files))
            ]
            together(calls)
        self._write_index(folder, group)

    def _complete(self, group: _Group, number: int, before: str | None) -> None:
        file = group.files[number]
        receipts = {part: receipt for (of, part), receipt in group.receipts.items() if of == number}
        with store_errors(self.uploads.url):
            self.uploads.complete(file.name, file.upload, receipts, self._token, before)

    def _write_index(self, folder: str, group: _Group) -> None:
        layout, index = group.layout, group.layout.index
        files = {PurePosixPath(n).name: PurePosixPath(to).name for n, to in group.called.items()}
        if index is None and all(name == to for name, to in files.items()):
            return
        if index is None:  # one file, whose own name was taken
            index = {"metadata": {"total_size": layout.total_size}}
            index["weight_map"] = dict.fromkeys(layout.tensors, next(iter(files.values())))
        else:
            index = {**index, "weight_map": {n: files[to] for n, to in index["weight_map"].items()}}
        text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (self.directory / folder / layout.index_name).write_text(text, encoding="utf-8")

    def _tagged(self, name: str, group: str) -> str:
        return f"{group}-{self._token}{name.removeprefix(group)}"

    def complete(self, document: JsonObject) -> dict[str, str]:
        """Upload what lies in ``directory``, give all its names, and have readers go by it.

        As ``Staging.complete``, whose ``document`` and result these are. Raises WriteError; what was there is
        then as it was, unless the message says otherwise.
        """
        document = {SAVED_AT: time.time_ns(), **document} if self._marker == MARKER else document
        beside = {
            file.relative_to(self.directory).as_posix(): file.read_bytes()
            for file in sorted(self.directory.rglob("*"))
            if file.is_file()
        }
        weights = {name: to for group in self._groups.values() for name, to in group.called.items()}
        staged = [*weights, *beside]
        contents = {"": staged} if self._by_document else grouped(staged, staged=True)
        state = "nothing was saved, and what was there is as it was"
        for key, of in contents.items():
            described = {**document, "format": FORMAT, "files": dict(document.get("files", {}))}
            if not self._by_document and "digests" in document:
                folders = {str(PurePosixPath(name).parent) for name in of if name in weights}
                described["digests"] = {f: d for f, d in document["digests"].items() if f in folders}
            with store_errors(self.uploads.url, state):
                self._publish(
                    key,
                    described,
                    {n: to for n, to in weights.items() if n in of},
                    {name: data for name, data in beside.items() if name in of},
                )
            state = "a part of it was saved: save again"
        self.discard()  # of what is left; where that fails, the next save does it
        return {name: to for name, to in weights.items() if name != to}

    def _publish(
        self, key: str, document: JsonObject, weights: Mapping[str, str], beside: Mapping[str, bytes]
    ) -> None:
        self._take_turn()
        there = self.uploads.listed()
        files = document["files"]
        sizes = {
            group.called[name]: file.size
            for group in self._groups.values()
            for name, file in zip(group.called, group.layout.files, strict=True)
        }
        whole = self._groups[key].alone if key in self._groups else False
        for name, to in weights.items():
            if not whole and (to not in there or there[to].size != sizes[to]):
                raise GoneError(f"{to} was removed")
            files[to] = {"bytes": sizes[to], **({"name": name} if name != to else {})}
        documents = documents_of(self.uploads, there)
        plan, now, later = self._planned(key, files, weights, beside, there, documents)
        others = _others(key, self._marker, files, documents, there)
        document.update(
            {"others": others} if others else {}, content=key, save=self._token, switch=plan.switch
        )
        if plan.over:
            document["over"] = plan.over
        text = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode() if self._marker else b""
        if self._marker and plan.switch != self._marker:
            plan.document = self._marker
            later = {**later, self._marker: text}
        if plan.switch == self._marker:
            plan.sha256 = hashlib.sha256(text).hexdigest()
        plan.names = sorted({*files, plan.switch})
        # 1. What is delivered after the switch, so that it can be if this process is killed, and the plan.
        own = f"{HIDDEN}/{self._token}"
        put = self.uploads.put
        together([functools.partial(put, f"{own}/{name}", data) for name, data in later.items()])
        self._note.write(plan=plan)
        # 2. What has to be there with the weights, and is not.
        together([functools.partial(put, name, data, None) for name, data in now.items()])
        # 3. The switch: one request, before which readers have all of the old, and after it all of the new.
        group = self._groups.get(key) if key in self._groups and self._groups[key].alone else None
        if group is not None and self.uploads.shared:
            self._complete(group, 0, plan.before)
        elif group is not None:
            self.uploads.give_name(group.files[0].name, plan.switch, plan.before)
        else:
            put(plan.switch, text if plan.switch == self._marker else beside[plan.switch], plan.before)
        # 4. The rest, which the next save does where this one cannot.
        before = "readers go by what was there before, which" if plan.over else "what was there before"
        with store_errors(self.uploads.url, f"all is there, but {before} is not removed"):
            finish(self.uploads, self._token, plan)
        # Their lengths would have them removed as what was given up.
        self._note.write(
            plan=None, files={**self._note.files, **dict.fromkeys(plan.weights, STAYS)}, publishing=False
        )

    def _others(self) -> list[JsonObject]:
        return living(self.uploads, self._token, self._note.now())

    def _take_turn(self) -> None:
        """Wait until no other save publishes here: each plans from what is there. Raises WriteError.

        Each notes that it does before it looks for others. Of two that see each other the one with the
        greater token takes that back, and looks again later.
        """
        until = time.monotonic() + 3 * LEASE
        while True:
            self._note.write(publishing=True)
            clear_one(self.uploads, self._token, self._note.now())
            earlier = [note["token"] for note in self._others() if note.get("publishing")]
            if not earlier:
                return
            if time.monotonic() > until:
                raise WriteError(f"{self.uploads.url}: another save has been at its last step for minutes")
            if min(earlier) < self._token:
                self._note.write(publishing=False)
            time.sleep(1.0 + random.random())

    def _planned(
        self,
        key: str,
        files: JsonObject,
        weights: Mapping[str, str],
        beside: Mapping[str, bytes],
        there: Mapping[str, Stored],
        documents: Mapping[str, JsonObject],
    ) -> tuple[Plan, dict[str, bytes], dict[str, bytes]]:
        """The plan of a content, and what is put before its switch and after it."""
        groups = {group_of(name, staged=True) for name in weights}
        tops = [contents_of(one) if name == MARKER else {key: one} for name, one in documents.items()]
        known = [content for top in tops for content in top.values()]
        old = contents_of(documents[MARKER]).get(key, {}) if MARKER in documents else {}
        old = documents.get(self._marker, {}) if self._marker != MARKER else old
        plan = Plan(self._marker)
        listed: list[str] = []
        for group in sorted(groups):
            single = f"{group}.safetensors"
            if not self._by_document:
                plan.switch = single if self._groups[group].alone else single + INDEX
                plan.over = single if not self._groups[group].alone and single in there else ""
            listed += [single, single + INDEX, *_in_index(self.uploads, single + INDEX, there)]
        listed += list(old.get("files", {}))
        folders = {PurePosixPath(group).parent for group in groups}
        going = (
            groups
            if not self._by_document
            else {group for group in grouped(old.get("files", {})) if PurePosixPath(group).parent in folders}
            | groups
        )
        new = {*files, *beside, plan.switch}
        plan.drop = {
            name: there[name].tag
            for name in dict.fromkeys(listed)
            if name in there and name not in new and {group_of(name), group_of(name, staged=True)} & going
        }
        now: dict[str, bytes] = {}
        later: dict[str, bytes] = {}
        for name, data in beside.items():
            digest = hashlib.sha256(data).hexdigest()
            files[name] = {"bytes": len(data), "sha256": digest}
            if name == plan.switch:
                plan.sha256 = digest
            elif name not in there:
                now[name], plan.made[name] = data, digest
            elif (found := self._digest(name, there[name], len(data))) != digest:
                ours = any(found and one["files"].get(name, {}).get("sha256") == found for one in known)
                ours = ours or (not found and any(name in one["files"] for one in known))
                is_index = self._by_document and name.endswith(INDEX)
                # Somebody's own file (a README of the script, say) stays, and this save has none of that
                # name. A configuration is replaced even so: weights would be read by another one's.
                if not ours and PurePosixPath(name).name not in CONTENT and not is_index:
                    del files[name]
                else:
                    later[name], plan.deliver[name] = data, there[name].tag
        plan.weights = list(weights.values())
        plan.before = there[plan.switch].tag if plan.switch in there else None
        return plan, now, later

    def _digest(self, name: str, stored: Stored, size: int) -> str:
        """The digest of a small file that is there; empty for one of another length, which it is not."""
        found = self.uploads.read(name) if stored.size <= max(size, 1 << 20) else None
        return "" if found is None else hashlib.sha256(found[0]).hexdigest()

    def discard(self) -> None:
        """Take back what was uploaded and has no names yet; what has made its switch is finished."""
        with contextlib.suppress(ZerostartError, TakenError, GoneError):
            self._close()

    def _close(self) -> None:
        # First, so that a second call finds nothing to do, whatever fails in this one.
        was, self._open = self._open, False
        if not was:
            return
        self._kept.cleanup()
        self._note.close()


def remove(uploads: Uploads, marker: str) -> None:
    """Remove the objects that the document ``marker`` of a directory names, and it.

    It is none any more from the first step on; what a kill leaves goes with the next save beside it. Raises
    WriteError.
    """
    found = uploads.read(marker)
    document = None if found is None else document_of(found[0])
    if document is None:
        return
    there = uploads.listed()
    token = uuid.uuid4().hex[:12]
    note = Note(uploads, token)
    plan = note.plan = Plan("", document=marker)
    plan.drop = {name: there[name].tag for name in sorted(named_by(document)) if name in there}
    note.write()
    uploads.remove([marker])
    remove_known(uploads, plan.drop)
    uploads.remove([f"{HIDDEN}/{token}.json"])


def _others(
    key: str,
    marker: str,
    files: Mapping[str, object],
    documents: Mapping[str, JsonObject],
    there: Mapping[str, Stored],
) -> JsonObject:
    """The contents that stay beside this one, as far as they are there."""
    found: JsonObject = {}
    if marker != MARKER or MARKER not in documents:
        return found
    for name, other in contents_of(documents[MARKER]).items():
        kept = {n: one for n, one in other["files"].items() if n not in files}
        if name != key and any(n in there for n in kept if n.endswith(".safetensors")):
            found[name] = {n: v for n, v in other.items() if n not in ("others", "switch", "over")}
            found[name]["files"] = kept
    return found


def _in_index(uploads: Uploads, index: str, there: Mapping[str, Stored]) -> list[str]:
    """What the index that is there lists."""
    data = uploads.read(index) if index in there else None
    if data is None:
        return []
    with contextlib.suppress(ZerostartError, AttributeError):
        listed = load_json(data[0], index, "index").get("weight_map")
        folder = PurePosixPath(index).parent
        values = set(listed.values()) if isinstance(listed, dict) else set()
        return sorted((folder / value).as_posix() for value in values if is_inside(value))
    return []


def part_length(layout: SaveLayout) -> int:
    """The length of the parts of a layout's files."""
    return part_bytes(max(file.size for file in layout.files))
