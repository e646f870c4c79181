"""Uploads to WebDAV servers by obstore (PROPFIND, PUT, DELETE of RFC 4918), and their MOVE."""

from __future__ import annotations

import base64
import contextlib
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from zerostart.checkpoint.manifest import HIDDEN
from zerostart.checkpoint.storage.staged_uploads import StagedUploads
from zerostart.checkpoint.storage.uploads import REMOVING, MayNotRemoveError, Stored, told
from zerostart.errors import WriteError

T = TypeVar("T")
#: Seconds that a request may take which sends or moves a file, and bytes a second that it may be expected to
#: send; seconds after which what has failed is not tried again.
PATIENCE, LEAST_RATE, AGAIN = 600, 1 << 20, 180
#: Seconds before each further attempt of what the library does not try again itself.
DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
#: The answer to what was done in part.
MULTI_STATUS = 207
_HINT = (
    "saves need a WebDAV server that lists, takes, moves and removes files (PROPFIND, PUT, MOVE, DELETE), as "
    "rclone serve webdav is; save to a local directory, or to s3://, gs:// or az://"
)


@dataclass(frozen=True)
class WebDavUploads(StagedUploads):
    """See ``Uploads``.

    ``reach`` gives the store, in any process, for requests of so many seconds; ``root`` is what is before
    keys, and ``password`` a name and a password with a colon between.
    """

    root: str = field(default="", kw_only=True)
    reach: Callable[[int], Any] = field(kw_only=True, compare=False, repr=False)
    password: str = field(default="", kw_only=True, compare=False, repr=False)

    def listed(self, folder: str = "") -> dict[str, Stored]:
        """See ``Uploads``: folder by folder, as not every server tells of all below one."""
        found: dict[str, Stored] = {}
        folders = [folder]
        while folders:
            inner, objects = self._folder(folders.pop())
            folders += inner
            found |= objects
        return found

    def folders(self, most: int | None = None) -> list[str]:
        """See ``Uploads``."""
        return self._folder("")[0]

    def read(self, name: str) -> tuple[bytes, str] | None:
        """See ``Uploads``."""
        # The tag before the bytes: what is put there between has another one, and is noticed.
        if (there := self.found(name)) is None:
            return None
        try:
            answer = self._asked(
                lambda: self._obstore.get(self._store(), self._key(name)).bytes(), name, "reading"
            )
        except FileNotFoundError:
            return None
        return bytes(answer), there.tag

    def found(self, name: str) -> Stored | None:
        """See ``StagedUploads``. By a list, as not every server tells the same of a file by itself."""
        return self._folder(name.rpartition("/")[0])[1].get(name)

    def send(self, name: str, data: bytes | memoryview) -> None:
        """See ``StagedUploads``."""
        # In steps, so that few connections to one server are kept.
        store = self.reach(PATIENCE * (1 + len(data) // (LEAST_RATE * PATIENCE)))
        self._asked(
            lambda: self._obstore.put(store, self._key(name), data, use_multipart=False), name, "uploading"
        )

    def move(self, name: str, to: str) -> None:
        """See ``StagedUploads``. Not by obstore, which would copy, so that readers would meet half a file."""
        self._asked(lambda: self._moved(name, to), to, "moving into its place")

    def _moved(self, name: str, to: str) -> None:
        made, unclear, begun = False, False, time.monotonic()
        for delay in (*DELAYS, None):
            try:
                self._request("MOVE", name, {"Destination": self._address(to), "Overwrite": "T"})
                return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (403, 409) and not made and delay is not None:  # no folder, perhaps
                    made = True
                    for folder in [str(one) for one in PurePosixPath(to).parents][-2::-1]:
                        with contextlib.suppress(urllib.error.HTTPError):  # it is there
                            self._request("MKCOL", folder, {})
                    if not unclear:
                        continue  # each attempt was refused: nothing has been moved
                elif error.code < 500 and error.code not in (408, 423, 425, 429):
                    raise
                failed: OSError = error
            except OSError as error:
                failed = error
            unclear = True
            if delay is None or time.monotonic() > begun + AGAIN:
                raise failed
            time.sleep(delay * random.uniform(0.5, 1))
            # Servers may remove what is at the new name before they look for the old one: where an attempt
            # has moved it whose answer was lost, another one would remove it.
            if self.seen(name, lambda found: found is not None) is None:
                if self.seen(to, lambda found: found is not None) is None:
                    raise WriteError(f"{self.url}/{name}: was removed by somebody else")
                return

    def _request(self, method: str, name: str, fields: Mapping[str, str]) -> None:
        request = urllib.request.Request(self._address(name), method=method, headers={**fields})
        if self.password:
            pair = base64.b64encode(self.password.encode()).decode()
            request.add_header("Authorization", f"Basic {pair}")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            if answer.status == MULTI_STATUS:  # of a file: it is not done (RFC 4918, 9.9.4)
                text = answer.read(1 << 16).decode("utf-8", "replace")
                statuses = re.findall(r"HTTP/1\.\d (\d{3}[^<]{0,40})", text)
                raise OSError(f"the server answered 207: {', '.join(statuses[:3]) or 'with no status'}")

    def _address(self, name: str) -> str:
        return self.root + urllib.parse.quote(self._key(name))

    def delete(self, name: str) -> None:
        """See ``StagedUploads``."""
        self._asked(lambda: self._obstore.delete(self._store(), self._key(name)), name, REMOVING)

    def delete_folder(self, folder: str) -> None:
        """See ``StagedUploads``: a server would remove what somebody puts there meanwhile as well.

        So those alone that a save has to itself.
        """
        if folder.startswith(f"{HIDDEN}/") and not self.listed(folder):
            try:
                self.delete(folder)
            except FileNotFoundError:
                return

    @property
    def _obstore(self) -> Any:
        import obstore

        return obstore

    def _store(self) -> Any:
        return self.reach(0)  # what is soon answered, or not at all

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.url[len(self.root) :].strip("/"), name)))

    def _folder(self, folder: str) -> tuple[list[str], dict[str, Stored]]:
        """The names of the folders and of the objects right in one."""
        begin = f"{self._key(folder)}/" if self._key(folder) else ""
        top = f"{self._key('')}/" if self._key("") else ""
        try:
            answer: Any = self._asked(
                lambda: self._obstore.list_with_delimiter(self._store(), begin.rstrip("/") or None),
                folder,
                "listing",
            )
        except FileNotFoundError:
            return [], {}
        # Nothing else than what lies there: names are a server's to make up.
        inner = [one.rstrip("/") for one in answer["common_prefixes"]]
        objects = {}
        for one in answer["objects"]:
            if one["path"].rpartition("/")[0] == begin.rstrip("/"):
                moment = one["last_modified"].timestamp()
                tag = one["e_tag"] or str(int(moment))
                objects[one["path"][len(top) :]] = Stored(one["size"], tag, moment)
        return [one[len(top) :] for one in inner if one.rpartition("/")[0] == begin.rstrip("/")], objects

    def _asked(self, ask: Callable[[], T], name: str, doing: str) -> T:
        kinds = self._obstore.exceptions
        try:
            return ask()
        except (FileNotFoundError, WriteError):
            raise
        except (kinds.BaseError, OSError, ValueError, TypeError) as error:
            text = told(error).partition(" Debug source")[0].partition("?")[0]
            denied = isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError))
            denied = denied or getattr(error, "code", 0) in (401, 403)
            hint = ""
            if denied:
                hint = "; give a name and password that may: https://NAME:PASSWORD@HOST/DIRECTORY"
            elif any(word in text for word in ("405", "501", "PROPFIND", "MOVE")):
                hint = f"; {_HINT}"
            kind = MayNotRemoveError if denied and doing == REMOVING else WriteError
            raise kind(
                f"{doing} {self.url}/{name} failed: {text}{hint}".replace("/ failed", " failed")
            ) from error
