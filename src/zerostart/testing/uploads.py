"""The suite of tests that whatever saves go to by a URL has to pass.

class TestMine(UploadsConformance):
    @contextmanager
    def place(self):
        with my_server() as address:
            yield MyUploads(f"mine://{address}/folder")
"""

from __future__ import annotations

import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from zerostart.checkpoint.storage.uploads import PART, GoneError, TakenError, Uploads
from zerostart.errors import WriteError


class UploadsConformance(ABC):
    """Tests of an ``Uploads``: subclass it, and implement ``place``."""

    @abstractmethod
    def place(self) -> AbstractContextManager[Uploads]:
        """Context manager that gives an empty directory of a store."""

    @pytest.fixture
    def uploads(self) -> Iterator[Uploads]:
        """The directory, as another process has it."""
        with self.place() as found:
            yield pickle.loads(pickle.dumps(found))

    def test_small_objects(self, uploads: Uploads) -> None:
        """Put, read, list and remove; expect what was put, and nothing where nothing is."""
        assert uploads.read("a.json") is None
        assert uploads.listed() == {}
        tag = uploads.put("a.json", b"one")
        uploads.put("inner/b c+.json", b"")
        assert uploads.read("a.json") == (b"one", tag)
        found = uploads.listed()
        assert {name: one.size for name, one in found.items()} == {"a.json": 3, "inner/b c+.json": 0}
        assert found["a.json"].tag == tag
        assert list(uploads.listed("inner")) == ["inner/b c+.json"]
        assert uploads.folders() == ["inner"]
        assert uploads.folders(1) == ["inner"]
        assert list(uploads.at(f"{uploads.url}/inner").listed()) == ["b c+.json"]
        uploads.remove(["a.json", "absent"])
        uploads.remove([])
        assert list(uploads.listed()) == ["inner/b c+.json"]

    def test_conditions(self, uploads: Uploads) -> None:
        """Replace an object that another has replaced meanwhile; expect TakenError, and that it stays."""
        first = uploads.put("a", b"one", None)
        second = uploads.put("a", b"two", first)
        for before in (None, first):
            with pytest.raises(TakenError):
                uploads.put("a", b"three", before)
        assert uploads.read("a") == (b"two", second)

    def test_a_large_object_appears_whole(self, uploads: Uploads) -> None:
        """Upload several parts; expect nothing there until the last step, and then the bytes."""
        parts = [bytes([number]) * PART for number in range(2)] + [b"end"]
        if not uploads.shared:
            for name in ("a", "c"):
                if uploads.staged:
                    with tempfile.TemporaryFile() as file:
                        file.write(b"".join(parts))
                        uploads.put_file(name, file)
                else:
                    uploads.stream(name, iter(parts), "mine")
            uploads.give_name("a", "b", None)
            assert uploads.staged or uploads.mark_of("b") == "mine"
            assert (uploads.read("b") or (b"", ""))[0] == b"".join(parts)
            with pytest.raises(TakenError):
                uploads.give_name("c", "b", None)
            uploads.give_name("c", "b", uploads.listed()["b"].tag)
            assert not uploads.staged or uploads.listed().keys() == {"b"}
            return
        other: Uploads = pickle.loads(pickle.dumps(uploads))
        upload = uploads.begin("a", "mine")
        assert [(one.name, one.upload) for one in uploads.unfinished()] == [("a", upload)]
        receipts = {number: other.part("a", upload, number, bytearray(parts[number])) for number in (2, 0, 1)}
        assert uploads.listed() == {}
        uploads.complete("a", upload, receipts, "mine", None)
        assert (uploads.read("a") or (b"", ""))[0] == b"".join(parts)
        assert uploads.unfinished() == []
        assert uploads.mark_of("a") == "mine"
        assert uploads.mark_of("absent") == ""
        # An attempt whose answer was lost is made again; another's of the same length is none.
        uploads.complete("a", upload, receipts, "mine", None)
        theirs = uploads.begin("a", "theirs")
        receipts = {number: uploads.part("a", theirs, number, parts[number]) for number in range(3)}
        with pytest.raises((GoneError, TakenError)):
            uploads.complete("a", theirs, receipts, "theirs", None)
        uploads.abort("a", theirs)
        assert uploads.mark_of("a") == "mine"

    def test_nothing_is_left_of_what_is_given_up(self, uploads: Uploads) -> None:
        """Give an upload up; expect no object, and no parts of one."""
        if uploads.staged:  # one that was not put yet lies on this machine
            return
        if not uploads.shared:

            def broken() -> Iterator[bytes]:
                yield bytes(PART)
                raise WriteError("given up")

            with pytest.raises(WriteError, match="given up"):
                uploads.stream("a", broken())
            assert uploads.listed() == {}
            return
        upload = uploads.begin("a")
        uploads.part("a", upload, 0, b"x")
        uploads.abort("a", upload)
        uploads.abort("a", upload)
        assert uploads.unfinished() == []
        with pytest.raises((GoneError, WriteError)):
            uploads.part("a", upload, 1, b"x")
