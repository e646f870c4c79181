"""Files of names that a directory of a store has none of yet: all of them come to be there, or none.

They are uploaded under their own names, small ones whole and large ones in parts, but for one: the file by
which readers find the others. Where that is there, all is. What a killed upload has left goes as what a
killed save has (``notes.py``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import uuid
from collections.abc import Mapping

from zerostart.checkpoint.manifest import HIDDEN
from zerostart.checkpoint.storage.uploads import GoneError, Stored, TakenError, Uploads
from zerostart.checkpoint.write.notes import (
    STAYS,
    Note,
    Plan,
    clear_killed,
    living,
    store_errors,
    together,
    wanted,
)
from zerostart.checkpoint.write.parts import Receipts, Uploading
from zerostart.errors import WriteError, ZerostartError


class NewObjects:
    """Leads an upload of new files; one process has it.

    After ``begin`` all ranks upload, then ``complete`` ends that, or ``discard``, which may be called at any
    time and more than once, removes what is there.
    """

    def __init__(self, uploads: Uploads) -> None:
        """Leave a note, after settling what killed saves have left. Raises WriteError."""
        self._token = uuid.uuid4().hex[:12]
        self.uploads = uploads = uploads.aside(f"{HIDDEN}/{self._token}")
        self._note = Note(uploads, self._token)
        self._open = True
        self._files: list[Uploading] = []
        try:
            self._note.begin()
            clear_killed(uploads, self._token, self._note.since())
            #: What lay there before.
            self.there: Mapping[str, Stored] = uploads.listed()
        except BaseException:
            self.discard()
            raise

    def begin(self, sizes: Mapping[str, int], part: int) -> list[Uploading]:
        """Begin to upload files of these lengths, those that are longer than a part in parts.

        What is uploaded whole has no upload in what this gives. Raises WriteError.
        """
        with store_errors(self.uploads.url):
            # Noted before it is looked at: of two that want the same names at once one sees the other at
            # least. Without lengths, by which what others have made meanwhile would be removed with this.
            self._note.write(files=dict.fromkeys(sizes, STAYS))
            others = living(self.uploads, self._token, self._note.now())
            if not all(sizes.keys().isdisjoint(wanted(one)) for one in others):
                raise WriteError(
                    f"{self.uploads.url}: another process is uploading files of these names; wait for it, or "
                    "name another place"
                )
            if taken := next((name for name in self.uploads.listed() if name in sizes), None):
                raise TakenError(f"{taken} is there")
            self._note.write(files=dict(sizes))
            names = list(sizes)
            large = [name for name, size in sizes.items() if size > part]
            ids = dict.fromkeys(large, self._token)
            if self.uploads.shared:
                begun = together(functools.partial(self.uploads.begin, name, self._token) for name in large)
                ids = dict(zip(large, begun, strict=True))
                self._note.write(begun=list(ids.values()))
        self._files = [Uploading(name, ids.get(name, "")) for name in names]
        return self._files

    def complete(self, receipts: Receipts, switch: str, data: bytes) -> None:
        """Complete the files, then make the file ``switch``, by which readers go. Raises WriteError."""
        with store_errors(self.uploads.url):
            if self.uploads.shared:
                together(
                    functools.partial(self._complete, number, receipts)
                    for number, file in enumerate(self._files)
                    if file.upload
                )
            sizes = self._note.files
            there = self.uploads.listed()
            for name, size in sizes.items():
                if name not in there or there[name].size != size:
                    raise GoneError(f"{name} was removed")
            plan = Plan(switch, hashlib.sha256(data).hexdigest(), weights=list(sizes), names=[*sizes, switch])
            self._note.write(plan=plan)
            self.uploads.put(switch, data, None)
        with store_errors(self.uploads.url, "all is there"):
            # What stays: else its lengths would have it removed as what was given up.
            self._note.write(plan=None, files=dict.fromkeys(sizes, STAYS))
        self.discard()

    def _complete(self, number: int, receipts: Receipts) -> None:
        file = self._files[number]
        own = {part: receipt for (of, part), receipt in receipts.items() if of == number}
        self.uploads.complete(file.name, file.upload, own, self._token, None)

    def discard(self) -> None:
        """Take back what was uploaded, unless it is complete."""
        with contextlib.suppress(ZerostartError, TakenError, GoneError):
            was, self._open = self._open, False
            if was:
                self._note.close()


def cleared(uploads: Uploads) -> Mapping[str, Stored]:
    """What is there once that is removed which killed saves have left. Raises WriteError."""
    new = NewObjects(uploads)
    new.discard()
    return new.there
