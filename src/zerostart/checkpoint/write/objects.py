"""Saves into a directory of a store that others may use, too: new objects, and one step to them.

An object appears whole, by the request that completes it. So weights are uploaded under names that nothing
has, and one request makes readers go by them (the switch): that which makes the index, or the document of a
training state, or completes the single file of weights; where an index takes over from a single file, the
removal of that. Then what belongs beside them takes the place of what was there, and the old weights go.

Before anything else a save leaves a note, ``.zerostart/TOKEN.json``: who saves, which names it uploads to,
and before its switch all that is to be done. It is made anew every half minute. So whoever saves next, there
or beside, finds the note of a save that was killed: of a process of the same machine that is no more, or one
that was not renewed for two minutes. It aborts the uploads of that, finishes it if it has made its switch,
and takes it back before. What a save that lives has noted it leaves alone. Saves to one place at the same
time upload to other names than each other, and plan and publish one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from zerostart.checkpoint.manifest import (
    FORMAT,
    HIDDEN,
    INDEX,
    MARKER,
    MARKERS,
    SAVED_AT,
    contents_of,
    group_of,
    grouped,
    is_inside,
)
from zerostart.checkpoint.storage.uploads import GoneError, Stored, TakenError, Uploads, part_bytes
from zerostart.checkpoint.strict_json import JsonObject, load_json
from zerostart.checkpoint.write.parts import Receipts, Uploading
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.switching import CONTENT
from zerostart.checkpoint.write.workers import all_of
from zerostart.errors import WriteError, ZerostartError

T = TypeVar("T")
#: Seconds after which a note that is not renewed is that of a killed save, and between two renewals.
LEASE, RENEWED = 120.0, 30.0
#: Most directories beside a place that are looked at for what killed saves have left.
_NEIGHBOURS = 100
#: What a note is called.
_NOTE = re.compile(rf"{re.escape(HIDDEN)}/[0-9a-f]{{12}}\.json")
#: Requests at once.
_TOGETHER = 16
#: Seconds by which a store's clock may tell two of its own moments in the wrong order.
_GRAIN = 2.0


@dataclass
class _Group:
    """Weights of one folder and stem: names in the layout, and those that they get."""

    layout: SaveLayout
    called: dict[str, str]
    files: list[Uploading]
    #: One file that readers find by its own name, which is completed by the switch.
    alone: bool
    receipts: Receipts = field(default_factory=dict)


@dataclass
class _Plan:
    """What is done when a content is published: see ``switching.Plan``, whose words these are."""

    #: The object that is made by the switch, the digest of its bytes (weights are marked), and the tag
    #: before.
    switch: str
    sha256: str = ""
    before: str | None = None
    #: The single file that has to be gone for the switch.
    over: str = ""
    #: Made before the switch, where nothing is: names and digests.
    made: dict[str, str] = field(default_factory=dict)
    #: Delivered after it, from below the token: names, and the tags of what they replace.
    deliver: dict[str, str | None] = field(default_factory=dict)
    #: Weights that are uploaded, which are this content's.
    weights: list[str] = field(default_factory=list)
    #: What goes in the end, with its tag.
    drop: dict[str, str] = field(default_factory=dict)
    #: The document, where that is not the switch.
    document: str = ""
    #: All that the document names.
    names: list[str] = field(default_factory=list)


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
        self.uploads, self._marker = uploads, marker
        self._by_document = marker not in (MARKER, "") if by_document is None else by_document
        self._token = uuid.uuid4().hex[:12]
        self._groups: dict[str, _Group] = {}
        self._kept = tempfile.TemporaryDirectory(prefix="zerostart-save-")
        self.directory = Path(self._kept.name)
        self._note = _Notice(uploads, self._token)
        self._open = True
        try:
            if marker and (found := uploads.read(marker)) is not None and _document(found[0]) is None:
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
        with _write_errors(self.uploads.url):
            self._note.write(files={**self._note.files, **(dict.fromkeys(of, 0) if alone else of)})
            # Noted before it is looked at: of two that want the same names at once one sees the other at
            # least.
            tagged = tagged or (not alone and any(of.keys() & _wanted(note) for note in self._others()))
            if tagged:
                called = {name: self._tagged(name, group) for name in names}
                sizes = {called[name]: size for name, size in of.items()}
                kept = {name: size for name, size in self._note.files.items() if name not in of}
                self._note.write(files={**kept, **sizes})
        shared = self.uploads.shared
        # What one process streams is there when it has all its parts: the switch copies it.
        keys = [f"{HIDDEN}/{self._token}/{name}" if alone and not shared else name for name in sizes]
        ids = [self._token] * len(keys)
        if shared:
            ids = _all([functools.partial(self.uploads.begin, key, self._token) for key in keys])
            with _write_errors(self.uploads.url):
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
            _all(calls)
        self._write_index(folder, group)

    def _complete(self, group: _Group, number: int, before: str | None) -> None:
        file = group.files[number]
        receipts = {part: receipt for (of, part), receipt in group.receipts.items() if of == number}
        with _write_errors(self.uploads.url):
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
            with _write_errors(self.uploads.url, state):
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
        documents = _documents(self.uploads, there)
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
        _all([functools.partial(put, f"{own}/{name}", data) for name, data in later.items()])
        self._note.write(plan=plan)
        # 2. What has to be there with the weights, and is not.
        _all([functools.partial(put, name, data, None) for name, data in now.items()])
        # 3. The switch: one request, before which readers have all of the old, and after it all of the new.
        group = self._groups.get(key) if key in self._groups and self._groups[key].alone else None
        if group is not None and self.uploads.shared:
            self._complete(group, 0, plan.before)
        elif group is not None:
            self.uploads.copy(group.files[0].name, plan.switch, plan.before)
        else:
            put(plan.switch, text if plan.switch == self._marker else beside[plan.switch], plan.before)
        # 4. The rest, which the next save does where this one cannot.
        with _write_errors(self.uploads.url, "all is there, but what was there before is not removed"):
            finish(self.uploads, self._token, plan)
        # Their lengths would have them removed as what was given up.
        self._note.write(
            plan=None, files={**self._note.files, **dict.fromkeys(plan.weights, 0)}, publishing=False
        )

    def _others(self) -> list[JsonObject]:
        return _living(self.uploads, self._token, self._note.now())

    def _take_turn(self) -> None:
        """Wait until no other save publishes here: each plans from what is there. Raises WriteError.

        Each notes that it does before it looks for others. Of two that see each other the one with the
        greater token takes that back, and looks again later.
        """
        until = time.monotonic() + 3 * LEASE
        while True:
            self._note.write(publishing=True)
            _clear_one(self.uploads, self._token, self._note.now())
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
    ) -> tuple[_Plan, dict[str, bytes], dict[str, bytes]]:
        """The plan of a content, and what is put before its switch and after it."""
        groups = {group_of(name, staged=True) for name in weights}
        tops = [contents_of(one) if name == MARKER else {key: one} for name, one in documents.items()]
        known = [content for top in tops for content in top.values()]
        old = contents_of(documents[MARKER]).get(key, {}) if MARKER in documents else {}
        old = documents.get(self._marker, {}) if self._marker != MARKER else old
        plan = _Plan(self._marker)
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
        self._note.end()
        settle(self.uploads, self._token, self._note.content(), self._note.now())


class _Notice:
    """What a save leaves in the store for as long as it lasts."""

    def __init__(self, uploads: Uploads, token: str) -> None:
        self._uploads, self._name = uploads, f"{HIDDEN}/{token}.json"
        #: Weights that are uploaded, and their lengths; 0 for what stays, of which uploads alone are aborted.
        self.files: dict[str, int] = {}
        self.plan: _Plan | None = None
        #: What the uploads are called that have begun.
        self.begun: list[str] = []
        #: Whether it is at the steps from its plan to the end, which one save at a time takes.
        self.publishing = False
        self._since = 0.0
        self._tag: str | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="zerostart-note", daemon=True)

    def begin(self) -> None:
        """Write it, and renew it from now on."""
        self.write()
        self._thread.start()

    def since(self) -> float:
        """The moment of its first writing, by the store's own clock."""
        self._since = self.now()
        return self._since

    def now(self) -> float:
        """The moment of its last writing, by the store's own clock."""
        there = self._uploads.listed(HIDDEN)
        return there[self._name].changed if self._name in there else time.time()

    def write(self, **changes: object) -> None:
        """Make it what it is now, with ``changes``. Raises WriteError, and GoneError.

        Where it is not as this save has left it, somebody has taken the save for a killed one.
        """
        with self._lock:
            for name, value in changes.items():
                setattr(self, name, value)
            try:
                self._tag = self._uploads.put(self._name, json.dumps(self.content()).encode(), self._tag)
            except TakenError as error:
                raise GoneError(
                    f"this save gave no sign of life for {LEASE:.0f} seconds, and another one has cleared it "
                    "away"
                ) from error

    def end(self) -> None:
        """Renew it no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def content(self) -> JsonObject:
        """As it is written."""
        plan = None if self.plan is None else vars(self.plan)
        return {
            "format": FORMAT,
            "by": _process(),
            "since": self._since,
            "files": dict(self.files),
            "begun": list(self.begun),
            "publishing": self.publishing,
            "plan": plan,
        }

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            with contextlib.suppress(Exception):  # of the store, which the save itself meets
                self.write()


def finish(uploads: Uploads, token: str, plan: _Plan) -> None:
    """What is left to do after the switch, also by a save that was killed. Raises WriteError."""
    own = f"{HIDDEN}/{token}"
    # Readers prefer a single file to an index: as long as it is there the old weights count.
    if plan.over and plan.over in plan.drop:
        _remove(uploads, {plan.over: plan.drop[plan.over]})
    for name, before in plan.deliver.items():
        if (data := uploads.read(f"{own}/{name}")) is not None:
            with contextlib.suppress(TakenError):  # somebody has just put something there
                uploads.put(name, data[0], before)
    if plan.document and (data := uploads.read(f"{own}/{plan.document}")) is not None:
        uploads.put(plan.document, data[0])
    _remove(uploads, plan.drop)
    uploads.remove(list(uploads.listed(own)))


def settle(uploads: Uploads, token: str, note: JsonObject, now: float) -> None:
    """Finish a save that has made its switch, take back one that has not; its note goes last.

    What a living save has noted for itself stays, and then the note stays, too. ``now`` is the store's time.
    Raises WriteError.
    """
    files: dict[str, int] = note["files"]
    since = note["since"] - _GRAIN
    plan = _Plan(**note["plan"]) if note["plan"] else None
    # In this order: whoever makes an object, or begins to upload it, has noted that before.
    unfinished = uploads.unfinished() if uploads.shared and files else []
    there = uploads.listed()
    others = _living(uploads, token, now)
    theirs = {name for other in others for name in _wanted(other)}
    known = {upload for other in others for upload in other["begun"]}
    own = [one for one in unfinished if one.upload in note["begun"]]
    # A request whose answer was lost may have begun one more, which nobody has noted.
    unknown = [
        one
        for one in unfinished
        if one.name in files and one.begun >= since and one.upload not in {*note["begun"], *known}
    ]
    own += [one for one in unknown if one.name not in theirs]
    unclear = any(one.name in theirs for one in unknown)
    switched = plan is not None and _is_switched(uploads, token, plan, there)
    _all([functools.partial(uploads.abort, one.name, one.upload) for one in own])
    if switched and plan is not None:
        finish(uploads, token, plan)
        files = {name: size for name, size in files.items() if name not in plan.weights}
        plan = None
    # What is not this save's any more, or was never its own alone, stays.
    named = {name for one in _documents(uploads, there).values() for name in _named(one)}
    named |= {plan.switch} if plan is not None else set()
    left = {
        name: stored
        for name, stored in there.items()
        if name not in named and stored.changed >= since  # something else may have been put there before
    }
    mine = [name for name, size in files.items() if name in left and left[name].size == size]
    for name, digest in plan.made.items() if plan is not None else ():
        found = uploads.read(name) if name in left else None
        if found is not None and hashlib.sha256(found[0]).hexdigest() == digest:
            mine.append(name)
    unclear = unclear or bool(theirs & {*mine})
    uploads.remove([*(name for name in mine if name not in theirs), *uploads.listed(f"{HIDDEN}/{token}")])
    if not unclear:
        uploads.remove([f"{HIDDEN}/{token}.json"])


def _living(uploads: Uploads, token: str, now: float) -> list[JsonObject]:
    """The notes of other saves to a directory that are not killed, each with its "token"."""
    return [
        {**note, "token": other}
        for other, note, _, changed in _notes(uploads, token)
        if _lives(note, changed, now)
    ]


def _wanted(note: JsonObject) -> set[str]:
    """The names of objects that a save makes, or that its document will name."""
    return {*note["files"], *((note["plan"] or {}).get("names", ()))}


def _notes(uploads: Uploads, token: str) -> Iterator[tuple[str, JsonObject, str, float]]:
    """The token of each save to a directory but one, its note, the tag of that, and when it was written."""
    for name, stored in uploads.listed(HIDDEN).items():
        path = PurePosixPath(name)
        found = uploads.read(name) if _NOTE.fullmatch(path.as_posix()) and path.stem != token else None
        note = None if found is None else _well_formed(found[0])
        if note is not None and found is not None:
            yield path.stem, note, found[1], stored.changed


def _lives(note: JsonObject, changed: float, now: float) -> bool:
    here = _is_here(note["by"])
    return now - changed < LEASE if here is None else here


def _is_switched(uploads: Uploads, token: str, plan: _Plan, there: Mapping[str, Stored]) -> bool:
    if not plan.switch:  # a removal: its first step is that of the document
        return plan.document not in there
    now = there.get(plan.switch)
    if now is None or now.tag == plan.before:
        return False
    if plan.sha256:
        found = uploads.read(plan.switch)
        return found is not None and hashlib.sha256(found[0]).hexdigest() == plan.sha256
    return uploads.mark_of(plan.switch) == token


def clear_killed(uploads: Uploads, token: str, now: float) -> None:
    """Settle what killed saves have left in a directory and in those beside it, as far as that can be.

    ``token`` is that of the save that does it, and ``now`` the store's time. Raises WriteError where the
    store does not answer.
    """
    above, _, name = uploads.url.rpartition("/")
    places = [uploads]
    # Beside too: a run saves to step-1, step-2, ..., and may never come back to the one that was cut. Not
    # where that is a whole bucket.
    if above.count("/") > 2:
        beside = uploads.at(above).folders(1000)[-_NEIGHBOURS:]
        places += [uploads.at(f"{above}/{other}") for other in beside if other not in (name, HIDDEN)]
    _all([functools.partial(_clear_one, place, token, now) for place in places])


def _clear_one(uploads: Uploads, token: str, now: float) -> None:
    for other, note, tag, changed in _notes(uploads, token):
        if _lives(note, changed, now):
            continue
        # What cannot be done now, the next save tries again.
        with contextlib.suppress(WriteError, TakenError, GoneError):
            # If it lives even so, it hears of this before its next step.
            taken = json.dumps({**note, "taken": token}).encode()
            uploads.put(f"{HIDDEN}/{other}.json", taken, tag)
            settle(uploads, other, note, now)


def _well_formed(data: bytes) -> JsonObject | None:
    """A note as a save has written it: anybody may have, and what is done by it is done to objects."""
    with contextlib.suppress(ZerostartError, TypeError, KeyError, AttributeError):
        note = load_json(data, HIDDEN, "note of a save", any_number=True)
        plan = _Plan(**note["plan"]) if note["plan"] else None
        names = [*note["files"]]
        if plan is not None:
            names += [
                *plan.made,
                *plan.weights,
                *plan.deliver,
                *plan.drop,
                *plan.names,
                *filter(None, (plan.switch, plan.over)),
            ]
            if plan.document not in ("", *MARKERS):
                return None
        sizes = all(type(size) is int for size in note["files"].values())
        if (
            sizes
            and all(map(is_inside, names))
            and type(note["since"]) is float
            and isinstance(note["by"], dict)
            and isinstance(note["begun"], list)
        ):
            return note
    return None


def _process() -> JsonObject:
    """What tells this process from all others, on this machine."""
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "space": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _is_here(by: Mapping[str, object]) -> bool | None:
    """Whether the process of a note lives, if it is of this machine; None where that cannot be told."""
    own = _process()
    if not own["boot"] or any(own[name] != by.get(name) for name in ("host", "boot", "space")):
        return None
    started = _started(by["pid"]) if type(by.get("pid")) is int else ""
    return bool(started) and started == by.get("started")


def _started(pid: object) -> str:
    """When a process was started, in ticks since the machine was; empty for one that is no more."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    # Field 22 of proc(5), of which the first two are before the bracket; a zombie is no more.
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def remove(uploads: Uploads, marker: str) -> None:
    """Remove the objects that the document ``marker`` of a directory names, and it.

    It is none any more from the first step on; what a kill leaves goes with the next save beside it. Raises
    WriteError.
    """
    found = uploads.read(marker)
    document = None if found is None else _document(found[0])
    if document is None:
        return
    there = uploads.listed()
    token = uuid.uuid4().hex[:12]
    note = _Notice(uploads, token)
    plan = note.plan = _Plan("", document=marker)
    plan.drop = {name: there[name].tag for name in sorted(_named(document)) if name in there}
    note.write()
    uploads.remove([marker])
    _remove(uploads, plan.drop)
    uploads.remove([f"{HIDDEN}/{token}.json"])


def _remove(uploads: Uploads, known: Mapping[str, str]) -> None:
    """Remove those objects that are still the ones that were planned."""
    if known:
        there = uploads.listed()
        uploads.remove([name for name, tag in known.items() if name in there and there[name].tag == tag])


def _documents(uploads: Uploads, there: Mapping[str, Stored]) -> dict[str, JsonObject]:
    """The documents of a directory, by name; a damaged one says nothing."""
    found = {}
    for name in MARKERS:
        data = uploads.read(name) if name in there else None
        if data is not None and (document := _document(data[0])):
            found[name] = document
    return found


def _document(data: bytes) -> JsonObject | None:
    """A document of ours; None for somebody else's."""
    with contextlib.suppress(ZerostartError):
        document = load_json(data, "a document", "document", any_number=True)
        if isinstance(document.get("files"), dict) and "format" in document:
            return document
    return None


def _named(document: JsonObject) -> set[str]:
    others = document.get("others", {})
    contents = [document, *(others.values() if isinstance(others, dict) else ())]
    return {name for one in contents for name in one.get("files", ()) if is_inside(name)}


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
        listed = load_json(data[0], index, "index", any_number=True).get("weight_map")
        folder = PurePosixPath(index).parent
        values = set(listed.values()) if isinstance(listed, dict) else set()
        return sorted((folder / value).as_posix() for value in values if is_inside(value))
    return []


def _all(calls: Iterable[Callable[[], T]]) -> list[T]:
    return all_of(calls, _TOGETHER)


@contextlib.contextmanager
def _write_errors(url: str, state: str = "nothing was saved") -> Iterator[None]:
    try:
        yield
    except (TakenError, GoneError) as error:
        raise WriteError(
            f"{url}: somebody else saves to the same place, or removes what this save uploads ({error}); "
            f"{state}"
        ) from error
    except WriteError as error:
        if state in str(error):
            raise
        raise WriteError(f"{error}; {state}") from error


def part_length(layout: SaveLayout) -> int:
    """The length of the parts of a layout's files."""
    return part_bytes(max(file.size for file in layout.files))
