"""What saves leave in a store while they last, so that those that are killed are told, and cleared away.

Before anything else a save leaves a note, ``.zerostart/TOKEN.json``: who saves, which names it uploads to,
and before its switch all that is to be done. It is made anew every half minute. So whoever saves next, there
or beside, finds the note of a save that was killed: of a process of the same machine that is no more, or one
that was not renewed for two minutes. It aborts the uploads of that, finishes it if it has made its switch,
and takes it back before. What a save that lives has noted it leaves alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from zerostart.checkpoint.manifest import (
    FORMAT,
    HIDDEN,
    MARKERS,
    is_inside,
)
from zerostart.checkpoint.storage.base import Storage
from zerostart.checkpoint.storage.uploads import GoneError, MayNotRemoveError, Stored, TakenError, Uploads
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, load_json
from zerostart.checkpoint.write.workers import all_of
from zerostart.errors import CheckpointNotFoundError, ReadError, WriteError, ZerostartError

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: Seconds after which a note that is not renewed is that of a killed save, and between two renewals.
LEASE, RENEWED = 120.0, 30.0
#: Most directories beside a place that are looked at for what killed saves have left.
_NEIGHBOURS = 100
#: What a note is called.
_NOTE = re.compile(rf"{re.escape(HIDDEN)}/[0-9a-f]{{12}}\.json")
#: What a note, or another small object, is called until it is moved into its place, and its most bytes.
_PART = re.compile(rf"{re.escape(HIDDEN)}/(?P<token>[0-9a-f]{{12}})/[0-9a-f]{{32}}\.part")
_SMALL_PART = 1 << 16
#: Requests at once.
_TOGETHER = 16
#: Seconds by which a store's clock may tell two of its own moments in the wrong order.
_GRAIN = 2.0
#: How often a reader looks again at a note that is written anew meanwhile.
_READINGS = 4
#: The length in a note of what is not to be removed, of which uploads alone are aborted.
STAYS = -1


@dataclass
class Plan:
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


class Note:
    """What a save leaves in the store for as long as it lasts."""

    def __init__(self, uploads: Uploads, token: str) -> None:
        self._uploads, self._token, self.name = uploads, token, f"{HIDDEN}/{token}.json"
        #: Weights that are uploaded, and their lengths, or STAYS.
        self.files: dict[str, int] = {}
        self.plan: Plan | None = None
        #: What the uploads are called that have begun.
        self.begun: list[str] = []
        #: Whether it is at the steps from its plan to the end, which one save at a time takes.
        self.publishing = False
        #: Whether it has failed, and whoever comes next settles what it has left, though its process lives.
        self.over = False
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
        return there[self.name].changed if self.name in there else time.time()

    def write(self, **changes: object) -> None:
        """Make it what it is now, with ``changes``. Raises WriteError, and GoneError.

        Where it is not as this save has left it, somebody has taken the save for a killed one.
        """
        with self._lock:
            for name, value in changes.items():
                setattr(self, name, value)
            try:
                self._tag = self._uploads.put(self.name, json.dumps(self.content()).encode(), self._tag)
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

    def close(self) -> None:
        """Settle the save, which is at its end: it has made its switch, or has failed.

        Raises WriteError; what could not be done then is for whoever saves next.
        """
        self.end()
        with told_of_what_stays(self._uploads, [self.name]):
            try:
                settle(self._uploads, self._token, self.content(), self.now())
            except WriteError:
                with contextlib.suppress(WriteError, GoneError):  # it may say so already
                    self.write(over=True)
                raise

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
            "over": self.over,
            "plan": plan,
        }

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            with contextlib.suppress(Exception):  # of the store, which the save itself meets
                self.write()


def finish(uploads: Uploads, token: str, plan: Plan) -> None:
    """What is left to do after the switch, also by a save that was killed. Raises WriteError."""
    own = f"{HIDDEN}/{token}"
    # Readers prefer a single file to an index: as long as it is there the old weights count.
    if plan.over and plan.over in plan.drop:
        remove_known(uploads, {plan.over: plan.drop[plan.over]})
    for name, before in plan.deliver.items():
        if (data := uploads.read(f"{own}/{name}")) is not None:
            with contextlib.suppress(TakenError):  # somebody has just put something there
                uploads.put(name, data[0], before)
    if plan.document and (data := uploads.read(f"{own}/{plan.document}")) is not None:
        uploads.put(plan.document, data[0])
    with told_of_what_stays(uploads, [*plan.drop, own]):
        remove_known(uploads, plan.drop)
        uploads.remove(list(uploads.listed(own)))


@contextlib.contextmanager
def told_of_what_stays(uploads: Uploads, names: Collection[str]) -> Iterator[None]:
    """Where credentials do not allow to remove what nobody goes by any more, warn that it stays."""
    try:
        yield
    except MayNotRemoveError as error:
        few = ", ".join([*names][:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        logger.warning(
            "%s: what nobody goes by any more stays there (%s): %s. Remove it, or give credentials that may "
            "delete objects",
            uploads.url,
            few,
            error,
        )


def settle(uploads: Uploads, token: str, note: JsonObject, now: float) -> None:
    """Finish a save that has made its switch, take back one that has not; its note goes last.

    What a living save has noted for itself stays, and then the note stays, too. ``now`` is the store's time.
    Raises WriteError; where nothing may be removed, the note says that nothing is left to do.
    """
    files: dict[str, int] = note["files"]
    since = note["since"] - _GRAIN
    plan = Plan(**note["plan"]) if note["plan"] else None
    # In this order: whoever makes an object, or begins to upload it, has noted that before.
    unfinished = uploads.unfinished() if uploads.shared and files else []
    there = uploads.listed()
    others = living(uploads, token, now)
    theirs = {name for other in others for name in wanted(other)}
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
    together([functools.partial(uploads.abort, one.name, one.upload) for one in own])
    if switched and plan is not None:
        finish(uploads, token, plan)
        files = {name: size for name, size in files.items() if name not in plan.weights}
        plan = None
    # What is not this save's any more, or was never its own alone, stays.
    named = {name for one in documents_of(uploads, there).values() for name in named_by(one)}
    named |= {plan.switch} if plan is not None else set()
    left = {
        name: stored
        for name, stored in there.items()
        if name not in named and stored.changed >= since  # something else may have been put there before
    }
    # A store may keep a request that was cut as an empty object.
    mine = [n for n, size in files.items() if size != STAYS and n in left and left[n].size in (0, size)]
    for name, digest in plan.made.items() if plan is not None else ():
        found = uploads.read(name) if name in left else None
        if found is not None and hashlib.sha256(found[0]).hexdigest() == digest:
            mine.append(name)
    unclear = unclear or bool(theirs & {*mine})
    own_name = f"{HIDDEN}/{token}.json"
    try:
        uploads.remove([*(name for name in mine if name not in theirs), *uploads.listed(f"{HIDDEN}/{token}")])
        if not unclear:
            uploads.remove([own_name])
    except MayNotRemoveError:
        # Without its plan, by which readers would look for what it has not delivered.
        names = note["files"] if mine else {}
        ended = {**note, "files": names, "begun": [], "plan": None, "publishing": False, "over": True}
        uploads.put(own_name, json.dumps(ended).encode())
        raise


def living(uploads: Uploads, token: str, now: float) -> list[JsonObject]:
    """The notes of other saves to a directory that are not killed, each with its "token"."""
    return [
        {**note, "token": other}
        for other, note, _, changed in _notes(uploads, token, uploads.listed(HIDDEN))
        if _lives(note, changed, now)
    ]


def not_delivered(folder: Storage, weights: Storage) -> dict[str, str]:
    """What a save has still to put beside ``weights``, to which it has made its switch: names, and places.

    It may have been killed. ``weights`` are files of ``folder`` as a reader has opened them, who has not
    looked at what is beside them yet. Raises ReadError.
    """
    marks = dict(zip(weights.names(), weights.identities, strict=True))
    hidden = folder.within(HIDDEN)
    for name in hidden.names() if hidden is not None else ():
        if hidden is None or not _NOTE.fullmatch(f"{HIDDEN}/{name}"):
            continue
        plan = _plan_in(hidden, name)
        if not plan:
            continue
        if plan["switch"] in marks:  # a single file, which has the name of the one before
            switched = str(marks[plan["switch"]]).strip('"') != str(plan["before"]).strip('"')
        else:
            switched = not marks.keys().isdisjoint(plan["weights"])
        if switched:
            return {one: f"{HIDDEN}/{PurePosixPath(name).stem}/{one}" for one in plan["deliver"]}
    return {}


def _plan_in(hidden: Storage, name: str) -> JsonObject | None:
    """The plan in a note, as a reader finds it; None for none, and where the save has ended meanwhile."""
    for last in (False,) * _READINGS + (True,):
        try:
            with hidden.named([name]).opened(0) as (handle, size):
                note = _well_formed(handle.read(min(size, MAX_DOCUMENT_BYTES), 0))
            return None if note is None else note["plan"]
        except CheckpointNotFoundError:
            return None
        except ReadError:  # it was written anew
            if last:
                raise
    return None


def wanted(note: JsonObject) -> set[str]:
    """The names of objects that a save makes, or that its document will name."""
    return {*note["files"], *((note["plan"] or {}).get("names", ()))}


def _notes(
    uploads: Uploads, token: str, listed: Mapping[str, Stored]
) -> Iterator[tuple[str, JsonObject, str, float]]:
    """The token of each save to a directory but one, its note, the tag of that, and when it was written."""
    for name, stored in listed.items():
        path = PurePosixPath(name)
        found = uploads.read(name) if _NOTE.fullmatch(path.as_posix()) and path.stem != token else None
        note = None if found is None else _well_formed(found[0])
        if note is not None and found is not None:
            yield path.stem, note, found[1], stored.changed


def _lives(note: JsonObject, changed: float, now: float) -> bool:
    here = False if note.get("over") else _is_here(note["by"])
    return now - changed < LEASE if here is None else here


def _is_switched(uploads: Uploads, token: str, plan: Plan, there: Mapping[str, Stored]) -> bool:
    if not plan.switch:  # a removal: its first step is that of the document
        return plan.document not in there
    now = there.get(plan.switch)
    if now is None or now.tag == plan.before:
        return False
    if plan.sha256:
        found = uploads.read(plan.switch)
        return found is not None and hashlib.sha256(found[0]).hexdigest() == plan.sha256
    if uploads.staged:  # which keeps no marks: it was moved
        return f"{HIDDEN}/{token}/{plan.switch}" not in there
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
    together([functools.partial(clear_one, place, token, now) for place in places])


def clear_one(uploads: Uploads, token: str, now: float) -> None:
    """The same for one directory."""
    listed = uploads.listed(HIDDEN)
    # A save may be killed before its first note is in its place. Of one that lives no such object is as old,
    # though its note may be missing for the moment in which a server moves a new one there.
    unnoted = [
        name
        for name, stored in listed.items()
        if (match := _PART.fullmatch(name)) and f"{HIDDEN}/{match['token']}.json" not in listed
        if stored.size <= _SMALL_PART and now - stored.changed > LEASE
    ]
    if unnoted:
        with contextlib.suppress(WriteError):  # the next save tries again
            uploads.remove(unnoted)
    for other, note, tag, changed in _notes(uploads, token, listed):
        if _lives(note, changed, now):
            continue
        # What cannot be done now, the next save tries again.
        with contextlib.suppress(WriteError, TakenError, GoneError):
            if not note["files"] and not note["plan"]:
                # Its own could not be removed then, or there is none yet.
                uploads.remove([*uploads.listed(f"{HIDDEN}/{other}"), f"{HIDDEN}/{other}.json"])
                continue
            # If it lives even so, it hears of this before its next step.
            taken = json.dumps({**note, "taken": token}).encode()
            uploads.put(f"{HIDDEN}/{other}.json", taken, tag)
            settle(uploads, other, note, now)


def _well_formed(data: bytes) -> JsonObject | None:
    """A note as a save has written it: anybody may have, and what is done by it is done to objects."""
    with contextlib.suppress(ZerostartError, TypeError, KeyError, AttributeError):
        note = load_json(data, HIDDEN, "note of a save")
        plan = Plan(**note["plan"]) if note["plan"] else None
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


def remove_known(uploads: Uploads, known: Mapping[str, str]) -> None:
    """Remove those objects that are still the ones that were planned."""
    if known:
        there = uploads.listed()
        uploads.remove([name for name, tag in known.items() if name in there and there[name].tag == tag])


def documents_of(uploads: Uploads, there: Mapping[str, Stored]) -> dict[str, JsonObject]:
    """The documents of a directory, by name; a damaged one says nothing."""
    found = {}
    for name in MARKERS:
        data = uploads.read(name) if name in there else None
        if data is not None and (document := document_of(data[0])):
            found[name] = document
    return found


def document_of(data: bytes) -> JsonObject | None:
    """A document of ours; None for somebody else's."""
    with contextlib.suppress(ZerostartError):
        document = load_json(data, "a document", "document")
        if isinstance(document.get("files"), dict) and "format" in document:
            return document
    return None


def named_by(document: JsonObject) -> set[str]:
    """The files of all contents of a document."""
    others = document.get("others", {})
    contents = [document, *(others.values() if isinstance(others, dict) else ())]
    return {name for one in contents for name in one.get("files", ()) if is_inside(name)}


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """What requests give, several at once; raises the first error, after all have ended."""
    return all_of(calls, _TOGETHER)


@contextlib.contextmanager
def store_errors(url: str, state: str = "nothing was saved") -> Iterator[None]:
    """Have what others did to the same names be a WriteError, and each say what that means."""
    try:
        yield
    except (TakenError, GoneError) as error:
        raise WriteError(
            f"{url}: somebody else saves to the same place, or removes what this save uploads ({error}); "
            f"{state}"
        ) from error
    except WriteError as error:
        if isinstance(error.__cause__, WriteError | TakenError | GoneError):
            raise  # it was said further in, where more is known
        raise WriteError(f"{error}; {state}") from error
