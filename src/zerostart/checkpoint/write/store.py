"""Publish a save in an object store: readers see the old or the new checkpoint.

Weights are uploaded under names that no object has. Then one request makes readers use them: the upload of
the index or of the training state's document, the end of the upload of a single file, or, where an index
replaces a single file, the removal of that file. The files of the old checkpoint are deleted last.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.checkpoint.manifest import (
    FORMAT,
    INDEX,
    MARKER,
    MARKERS,
    SAVED_AT,
    contents_of,
    group_of,
    grouped,
    is_inside,
)
from zerostart.checkpoint.storage.upload import ObjectWriter, StoreDirectory
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.staging import CONTENT, describe
from zerostart.errors import WriteError

logger = logging.getLogger("zerostart")


class StoreStaging:
    """Save into a store, run by rank 0.

    Small files are written to the local ``directory``. Ranks upload the files that ``begin_files`` names.
    Then :meth:`complete` publishes all of them, or :meth:`discard` deletes them.
    """

    def __init__(self, store: StoreDirectory, marker: str) -> None:
        """List the directory. Raises WriteError.

        ``marker`` is the name of the document, empty for none. Readers use the document of a training state,
        and otherwise the index of the weights.
        """
        self._store, self._marker = store, marker
        self._by_document = marker not in (MARKER, "")
        self._token = uuid.uuid4().hex[:12]
        self._temporary = tempfile.TemporaryDirectory(prefix="zerostart-save-")
        self.directory = Path(self._temporary.name)
        self._there = store.list()
        #: Files of weights: the name in the store and the size, by the name in the layout.
        self._weights: dict[str, tuple[str, int]] = {}
        #: Single files that readers find by their own names, whose uploads end in ``complete``.
        self._held: list[ObjectWriter] = []
        self._singles: set[str] = set()
        self._published = False
        documents = {name: self._read_json(name) for name in MARKERS}
        self._documents = {
            name: one for name, one in documents.items() if one is not None and _is_document(one)
        }
        if marker in self._there and marker not in self._documents:
            self.discard()
            raise WriteError(
                f"{store.url}/{marker} was not written by zerostart, and this save would replace it: rename "
                "it, or save to another directory"
            )

    def begin_files(self, folder: str, layout: SaveLayout) -> list[str]:
        """Return stored names for ``layout``; write the index."""
        begin = "" if folder == "." else f"{folder}/"
        (self.directory / folder).mkdir(parents=True, exist_ok=True)
        names = [begin + file.name for file in layout.files]
        single = f"{begin}{layout.stem}.safetensors"
        if not self._by_document and layout.index is None:
            self._singles.add(names[0])
            stored = names
        elif self._there.keys() & {*names, single, single + INDEX}:
            length = len(begin + layout.stem)
            stored = [f"{name[:length]}-{self._token}{name[length:]}" for name in names]
        else:
            stored = names
        sizes = [file.size for file in layout.files]
        self._weights |= dict(zip(names, zip(stored, sizes, strict=True), strict=True))
        if layout.index is not None or stored != names:
            index = layout.index or {"metadata": {"total_size": layout.total_size}}
            files = [PurePosixPath(name).name for name in stored]
            places = {name: files[entry.file] for name, entry in layout.tensors.items()}
            text = json.dumps({**index, "weight_map": places}, indent=2, sort_keys=True, ensure_ascii=False)
            (self.directory / folder / layout.index_name).write_text(text + "\n", encoding="utf-8")
        return stored

    def hold(self, name: str, writer: ObjectWriter) -> bool:
        """Keep a publishing upload open until ``complete``."""
        if name in self._singles:
            self._held.append(writer)
        return name in self._singles

    def complete(self, document: dict[str, Any]) -> dict[str, str]:
        """Publish all files; return the changed weights names.

        The result has their layout names as keys. ``document`` becomes the document of the save.
        Raises WriteError.
        """
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file())
        small = {path.relative_to(self.directory).as_posix(): path for path in paths}
        groups = {group_of(name, staged=True) for name in self._weights}
        switches = {name for name in small if name.removesuffix(f".safetensors{INDEX}") in groups}
        old, new = self._old_files(groups), {stored for stored, _ in self._weights.values()}
        changed = {name for name in small.keys() & self._there.keys() - switches if self._differs(name)}
        for name in changed - self._listed():
            if PurePosixPath(name).name not in CONTENT:
                del small[name]  # a user's own file stays
        changed &= small.keys()
        state, after = (
            "the checkpoint that was there is unchanged",
            "the new checkpoint is there, with old files",
        )
        try:
            for name in sorted(small.keys() - switches - self._there.keys()):
                self._store.put(name, small[name])
            text = json.dumps(self._document(document, small), indent=1, ensure_ascii=False) + "\n"
            if self._by_document:
                self._store.put(self._marker, text.encode())
                self._published, state = True, after
            self._switch({name: small[name] for name in sorted(switches)}, old)
            state = after
            for name in sorted(changed):
                self._store.put(name, small[name])
            if self._marker and not self._by_document:
                self._store.put(self._marker, text.encode())
            self._store.delete(sorted(old - new - small.keys()))
        except WriteError as error:
            raise WriteError(f"{error}; {state}: save again") from None
        self.discard()
        return {name: stored for name, (stored, _) in self._weights.items() if name != stored}

    def _switch(self, indexes: Mapping[str, Path], old: set[str]) -> None:
        """Make readers use the new weights."""
        self._published = True  # from here on readers may use them, so that ``discard`` keeps them
        for name, path in indexes.items():
            self._store.put(name, path)
            single = name.removesuffix(INDEX)
            if single in old:  # readers prefer it to an index
                self._store.delete([single])
        for writer in self._held:
            writer.close()

    def discard(self) -> None:
        """Delete unpublished uploads; may be repeated."""
        self._held.clear()
        self._temporary.cleanup()
        if not self._published:
            new = {stored for stored, _ in self._weights.values()} - self._there.keys()
            self._weights = {}
            try:
                self._store.delete(sorted(new))
            except WriteError as error:
                logger.warning("%s; delete what the failed save has left yourself", error)

    def _listed(self) -> set[str]:
        """Return the files of the directory's documents."""
        contents = [one for document in self._documents.values() for one in contents_of(document).values()]
        return {name for one in contents for name in one["files"] if is_inside(name)}

    def _old_files(self, groups: set[str]) -> set[str]:
        files = {name for name in self._listed() if group_of(name) in groups}
        for group in groups:
            folder = PurePosixPath(group).parent
            files |= {f"{group}.safetensors", f"{group}.safetensors{INDEX}"}
            index = self._read_json(f"{group}.safetensors{INDEX}") or {}
            listed = index.get("weight_map")
            shards = set(listed.values()) if isinstance(listed, dict) else set()
            files |= {(folder / file).as_posix() for file in shards if is_inside(file)}
            tagged = re.compile(rf"{re.escape(group)}-[0-9a-f]{{12}}(-\d{{5}}-of-\d{{5}})?\.safetensors")
            files |= {name for name in self._there if tagged.fullmatch(name)}
        return files & self._there.keys()

    def _document(self, document: dict[str, Any], small: Mapping[str, Path]) -> dict[str, Any]:
        files: dict[str, Any] = {name: describe(path) for name, path in small.items()}
        for name, (stored, size) in self._weights.items():
            files[stored] = {"bytes": size, **({"name": name} if name != stored else {})}
        document = {SAVED_AT: time.time_ns(), **document} if self._marker == MARKER else document
        if self._by_document:
            return {**document, "format": FORMAT, "files": files, "content": ""}
        names = {stored: name for name, (stored, _) in self._weights.items()}
        contents: dict[str, dict[str, Any]] = {}
        for key, of in grouped([names.get(name, name) for name in files], staged=True).items():
            own = {name: one for name, one in files.items() if names.get(name, name) in of}
            folders = {str(PurePosixPath(name).parent) for name in own if name in names}
            digests = {f: d for f, d in document.get("digests", {}).items() if f in folders}
            contents[key] = {**document, "format": FORMAT, "files": own, "digests": digests, "content": key}
        old_contents = contents_of(self._documents[MARKER]) if MARKER in self._documents else {}
        for key, other in old_contents.items():
            remaining = {name: one for name, one in other["files"].items() if name not in files}
            if key not in contents and any(n in self._there for n in remaining if n.endswith(".safetensors")):
                contents[key] = {**other, "files": remaining}
        top, *rest = contents
        return {**contents[top], "others": {key: contents[key] for key in rest}} if rest else contents[top]

    def _differs(self, name: str) -> bool:
        data = (self.directory / name).read_bytes()
        return self._there[name] != len(data) or self._store.read(name) != data

    def _read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object, or None."""
        data = self._store.read(name) if name in self._there else None
        try:
            document = json.loads(data or b"null")
        except ValueError:
            return None
        return document if isinstance(document, dict) else None


def _is_document(document: dict[str, Any]) -> bool:
    """Return True if zerostart wrote the document."""
    more = document.get("others", {})
    contents = [document, *(more.values() if isinstance(more, dict) else [None])]
    has_files = all(isinstance(one, dict) and isinstance(one.get("files"), dict) for one in contents)
    return has_files and "format" in document
