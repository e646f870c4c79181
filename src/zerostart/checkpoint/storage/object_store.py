"""Read byte ranges from object stores and web servers, through obstore."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit, urlunsplit

from zerostart.checkpoint.paths import shown_url
from zerostart.checkpoint.storage.base import Reader, RequestCost, Residency, Rows, Storage
from zerostart.checkpoint.usual_names import STANDARD_NAMES, USUAL_SETTINGS
from zerostart.errors import CheckpointNotFoundError, ConfigError, ReadError, without_secrets

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

WEB, AWS = ("http", "https"), ("s3", "s3a")
STORES = (*AWS, "gs", "az", "azure", "adl", "abfs", "abfss")
#: Retries of a data request; of a metadata request, few so that a wrong address fails soon; and seconds after
#: which no request is retried.
RETRIES, METADATA_RETRIES, RETRY_TIMEOUT_S = 8, 4, 30
#: Timeouts: to connect, without progress of a read, without progress of a write, of a whole request.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, WRITE_TIMEOUT_S, REQUEST_TIMEOUT_S = 10.0, 15.0, 60.0, 3600.0
#: Size of a piece of a response, and memory of a reader thread in addition to its buffers, in bytes.
PIECE_BYTES, THREAD_BYTES = 256 << 10, 1 << 20
#: Concurrent data requests of all ranks of a machine, and concurrent metadata requests.
MAX_REQUESTS, MAX_METADATA_REQUESTS = 64, 16
#: Assumed cost of a request, for checkpoints smaller than ``MEASURED_BYTES``.
USUAL_COST = RequestCost(latency=0.03, rate=100e6)
MEASURED_BYTES, SAMPLE_BYTES = 64 << 20, 4 << 20
#: Suffixes of file names; other names may be directories.
_FILE_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")
#: Environment variables that give AWS credentials without a profile.
_CREDENTIALS = {
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
}
#: Address and reason in the debug text of a connection error.
_ADDRESS = re.compile(r'"tcp connect error",\s*([^\s,]+),')
_REASON = re.compile(r'(?:message|error): "([^"]+)"|Invalid(Certificate|Message)\(\s*(\w+)')
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """Size and version mark of an object.

    The mark is the ETag or, without one, the modification time.
    """

    size: int
    mark: Hashable


@dataclass(frozen=True)
class ObjectFiles(Storage):
    """Files at URLs; ``identities`` are marks of objects."""

    #: URL prefix of the file names, before the key.
    root: str = field(default="", kw_only=True)
    #: URL of the bucket or server for obstore; may contain secrets.
    base: str = field(default="", repr=False, compare=False, kw_only=True)

    schemes = (*STORES, *WEB)
    cached = False

    @classmethod
    def places(cls, source: str) -> tuple[str, str, str]:
        """Split a URL into ``root``, ``base`` and key. Raises ConfigError."""
        url = urlsplit(source)
        scheme = url.scheme.lower()
        if not url.netloc:
            raise ConfigError(
                f"{shown_url(source)}: names no bucket or server; write {scheme}://NAME/DIRECTORY"
            )
        if scheme not in WEB and url.password is not None:
            raise ConfigError(
                f"{shown_url(source)}: zerostart reads no credentials from a URL; give them as the "
                "provider's own tools expect them (see docs/stores.md)"
            )
        if scheme not in WEB:
            bucket, _, key = source.partition("://")[2].partition("/")
            return f"{scheme}://{bucket}/", f"{scheme}://{bucket}", key.strip("/")
        if "#" in source or re.search(r"[\t\r\n]", source):
            raise ConfigError(
                f"{shown_url(source)}: contains a # or a line break, which would cut the name; "
                "write %23 for a # in a name"
            )
        # The query is a signature; every request must send it.
        base = urlunsplit((scheme, url.netloc, "/", url.query, ""))
        return f"{scheme}://{url.netloc.rpartition('@')[2]}/", base, unquote(url.path.strip("/"))

    @classmethod
    def at(cls, source: str) -> Storage:
        root, base, key = cls.places(source)
        storage = cls((), (), root=root, base=base)
        folder, _, name = key.rpartition("/")
        if key.endswith(_FILE_ENDINGS) and (found := storage._find(key)):
            return storage._open_folder(folder, {key: found}, name)
        below = storage._open_folder(key)
        # A file may have any suffix: request it if no such directory exists.
        if not below.files and not key.endswith(_FILE_ENDINGS) and key and (found := storage._find(key)):
            return storage._open_folder(folder, {key: found}, name)
        if not below.files:
            raise CheckpointNotFoundError(
                f"{root}{key}: there is no such file, and no directory of that name with files of a "
                "checkpoint; check the URL and the credentials: some stores answer this for every object "
                "that the user may not read"
            )
        return below

    def named(self, names: Sequence[str]) -> Storage:
        keys = [self._key(f"{self.folder}/{name}") for name in names]
        objects = self._request_all(keys, self._find)
        for name, key in zip(names, keys, strict=True):
            if key not in objects:
                raise CheckpointNotFoundError(
                    f"{self.folder}/{name}: this file of the checkpoint is missing; upload it again"
                )
        return self._with_files({key: objects[key] for key in keys})

    def directory(self) -> Storage:
        return self._open_folder(self._key(f"{self.folder}/").rstrip("/"))

    def measured(self) -> Storage:
        if self.nbytes < MEASURED_BYTES:
            return replace(self, cost=USUAL_COST)
        file = max(range(len(self.files)), key=lambda number: self.sizes[number])
        length = min(SAMPLE_BYTES, self.sizes[file])
        times = [time.perf_counter()]
        self.fetch(file, 0, length, lambda at, piece: times.append(time.perf_counter()))
        latency, seconds = times[1] - times[0], times[-1] - times[0]
        # A fast store sends more than the first piece before that piece is delivered.
        rate = length / max(seconds - latency, seconds / 8)
        return replace(self, cost=RequestCost(float(f"{latency:.2g}"), float(f"{rate:.2g}")))

    def reader(self, *, cold: bool = False, direct: bool = False) -> Reader:
        return ObjectReader(self)

    def residency(self) -> Residency:
        return Residency(self.root.partition(":")[0], None, True, depth=MAX_REQUESTS, buffer=THREAD_BYTES)

    def identity(self, file: int) -> Hashable:
        metadata = self._find(self._key(self.files[file]))
        return None if metadata is None else metadata.mark

    def changed(self, before: Hashable, now: Hashable) -> str:
        return "was removed" if now is None else f"was replaced: its ETag is {now} and was {before}"

    def fetch(self, file: int, offset: int, length: int, write: Callable[[int, memoryview], None]) -> None:
        """Read a byte range in pieces.

        ``write`` receives each piece with its offset. obstore retries failed requests. If the object
        has an ETag, it also continues interrupted responses.
        """
        name = self.files[file]
        if offset + length > self.sizes[file]:
            raise ReadError(
                f"{name} ended at byte {self.sizes[file]}, where bytes {offset} to {offset + length} "
                "were expected; was it replaced during the load?"
            )
        if not length:
            return
        count, mark = 0, self.identities[file] if self.identities else None
        options: dict[str, Any] = {"range": (offset, offset + length)}
        # Weak ETags never match. Some servers send ETags without quotes.
        if isinstance(mark, str) and mark.startswith('"'):
            options["if_match"] = mark
        failed = f"reading {length} bytes of {name} at offset {offset} failed"
        with _errors(failed, f"{name} was removed after the checkpoint was opened"):
            try:
                answer = _obstore().get(open_store(self.base, RETRIES), self._key(name), options=options)
            except _obstore().exceptions.PreconditionError:
                raise self._changed_error(name, f"its ETag is no longer {mark}") from None
            if mark is not None and (found := _parse_metadata(answer.meta)) != Found(self.sizes[file], mark):
                raise self._changed_error(name, f"its ETag is {found.mark} and was {mark}")
            for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                write(count, memoryview(piece)[: length - count])
                count = min(length, count + len(piece))
        if count < length:
            raise ReadError(f"{failed}: the response ended {length - count} bytes too early; load again")

    def _changed_error(self, name: str, reason: str) -> ReadError:
        return ReadError(
            f"{name} was changed since the checkpoint was opened ({reason}); load again when no other "
            "process writes to it"
        )

    @property
    def _store(self) -> ObjectStore:
        return open_store(self.base, min(RETRIES, METADATA_RETRIES))

    def _key(self, file: str) -> str:
        return file.removeprefix(self.root)

    def _find(self, key: str) -> Found | None:
        """Request an object's metadata, or return None."""
        with _errors(f"{self.root}{key}: asking the store failed"):
            try:
                return _parse_metadata(_obstore().head(self._store, key))
            except FileNotFoundError:
                return None
            except Exception:  # a URL may be signed for GET requests only
                if not self._is_signed:
                    raise
            try:
                return _parse_metadata(_obstore().get(self._store, key, options={"range": (0, 1)}).meta)
            except FileNotFoundError:
                return None

    def _list(self, folder: str) -> dict[str, Found] | None:
        """List the objects in ``folder``; None if refused."""
        if self._is_signed:
            return None
        try:
            listed: Any = _obstore().list_with_delimiter(self._store, f"{folder}/" if folder else None)
        except FileNotFoundError:
            return None if self.root.startswith("http") else {}
        except Exception as error:
            if _is_refused(error) or "Error decoding PROPFIND response" in str(error):
                return None
            with _errors(f"{self.root}{folder}: asking the store failed"):
                raise
        # Keep objects directly in the folder whose names can be names of local copies.
        objects = {
            one["path"]: Found(one["size"], None)
            for one in listed["objects"]
            if one["path"].rpartition("/")[0] == folder and one["path"].rpartition("/")[2].strip(".")
        }
        # A web server that cannot list may answer with an empty list.
        return None if not objects and self.root.startswith("http") else objects

    @property
    def _is_signed(self) -> bool:
        return bool(urlsplit(self.base).query)

    def _request_all(self, keys: Iterable[str], request: Callable[[str], T | None]) -> dict[str, T]:
        """Call ``request`` for each key in threads."""
        unique_keys = list(dict.fromkeys(keys))
        with ThreadPoolExecutor(max(1, min(MAX_METADATA_REQUESTS, len(unique_keys)))) as pool:
            answers = dict(zip(unique_keys, pool.map(request, unique_keys), strict=True))
        return {key: one for key, one in answers.items() if one is not None}

    def _with_files(self, objects: Mapping[str, Found]) -> Self:
        return replace(
            self,
            files=tuple(f"{self.root}{key}" for key in objects),
            sizes=tuple(one.size for one in objects.values()),
            identities=tuple(one.mark for one in objects.values()),
        )

    def _open_folder(
        self, folder: str, known_objects: Mapping[str, Found] | None = None, name: str = ""
    ) -> Storage:
        begin = f"{folder}/" if folder else ""
        objects, refused = dict(known_objects or {}), list[ReadError]()
        listed = self._list(folder)
        if listed is not None:
            objects |= {key: one for key, one in listed.items() if key not in objects}
        else:

            def find(key: str) -> Found | None:
                try:
                    return self._find(key)
                except ReadError as error:  # the user may be allowed to read some of the files only
                    refused.append(error)
                    return None

            names = (f"{begin}{name}" for name in (*STANDARD_NAMES, *USUAL_SETTINGS))
            objects |= self._request_all((key for key in names if key not in objects), find)
            if refused and not objects:
                raise refused[0]
        return replace(self._with_files(objects), folder=f"{self.root}{folder}".removesuffix("/"), asked=name)


class ObjectReader(Reader):
    """Thread-safe reader of byte ranges of objects."""

    def __init__(self, storage: ObjectFiles) -> None:
        self._storage = storage
        _ = storage._store  # raise errors of the settings now

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        pending = list(buffers)

        def fill(_: int, piece: memoryview) -> None:
            while piece and pending:
                count = min(len(piece), len(pending[0]))
                pending[0][:count] = piece[:count]
                pending[0], piece = pending[0][count:], piece[count:]
                if not pending[0]:
                    pending.pop(0)

        self._storage.fetch(file, offset, sum(map(len, buffers)), fill)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        if rows.stride - rows.width > self._storage.gap:
            super().gather(file, offset, rows, target, step)
            return

        def scatter(at: int, piece: memoryview) -> None:
            end = at + len(piece)
            for row in range(at // rows.stride, min(rows.count, -(-end // rows.stride))):
                begin = row * rows.stride
                first, last = max(at, begin), min(end, begin + rows.width)
                if first < last:
                    place = row * step + first - begin
                    target[place : place + last - first] = piece[first - at : last - at]

        self._storage.fetch(file, offset, rows.span, scatter)


def open_store(base: str, retries: int, writing: bool = False) -> ObjectStore:
    """Open the store at ``base``. Raises ConfigError."""
    _check_process()
    prefixes = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_")
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(prefixes)))
    return _opened(base, settings, writing, retries)


@functools.lru_cache(maxsize=8)
def _opened(base: str, settings: tuple[tuple[str, str], ...], writing: bool, retries: int) -> ObjectStore:
    obstore, scheme = _obstore(), base.partition(":")[0]
    idle_timeout = WRITE_TIMEOUT_S if writing else READ_TIMEOUT_S
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        "read_timeout": timedelta(seconds=idle_timeout),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
    }
    options: dict[str, Any] = _aws_profile(dict(settings)) if scheme in AWS else {}
    options["retry_config"] = {"max_retries": retries, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)}
    options["client_options"] = client
    if writing and scheme in AWS:
        options["checksum_algorithm"] = "SHA256"  # the store rejects bytes that were changed in transit
    url = urlsplit(base)
    user, _, host = url.netloc.rpartition("@")
    if scheme in WEB and user:  # obstore does not send it and shows it in errors
        name, _, password = user.partition(":")
        pair = base64.b64encode(b":".join((unquote_to_bytes(name), unquote_to_bytes(password))))
        options["client_options"]["default_headers"] = {"authorization": f"Basic {pair.decode()}"}
        base = urlunsplit(url._replace(netloc=host))
    endpoints = [one for name, one in settings if "ENDPOINT" in name] + [str(options.get("endpoint"))]
    if scheme == "http" or any(one.startswith("http://") for one in endpoints):
        options["client_options"]["allow_http"] = True
    try:
        store: ObjectStore = obstore.store.from_url(base, **options)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"{shown_url(base)}: cannot open the store: {error_text(error)}; give the settings that the "
            "provider's own tools expect (see docs/stores.md)"
        ) from None
    return store


def _aws_profile(settings: Mapping[str, str]) -> dict[str, Any]:
    """Read the user's AWS profile. Raises ConfigError."""
    files = (("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    have_files = [os.path.exists(os.path.expanduser(settings.get(name, file))) for name, file in files]  # noqa: PTH110, PTH111
    if _CREDENTIALS & settings.keys() or not (any(have_files) or "AWS_PROFILE" in settings):
        return {}
    try:
        from botocore.session import Session

        session = Session()
        profile: dict[str, Any] = session.get_scoped_config()
        credentials = session.get_credentials()
    except ImportError as error:
        raise ConfigError(
            "zerostart needs botocore to read AWS profiles: pip install botocore, or give "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    except Exception as error:  # any botocore error; its text may contain a key
        raise ConfigError(f"botocore cannot read the AWS profile ({type(error).__name__})") from None

    def provide() -> dict[str, Any]:
        keys = credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=15),
        }

    options: dict[str, Any] = {} if credentials is None else {"credential_provider": provide}
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & settings.keys():
        options["region"] = profile["region"]
    if "endpoint_url" in profile and not any("ENDPOINT" in name for name in settings):
        options["endpoint"] = profile["endpoint_url"]
    return options


def _obstore() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise ConfigError(
            "zerostart needs obstore to read URLs, and it is not installed: pip install 'zerostart[stores]'"
        ) from error
    return obstore


#: Id of the process that first used a store; a forked process inherits it.
_first_process: list[int] = []


def _check_process() -> None:
    """Raise ConfigError in a forked process.

    obstore has no threads there and would hang.
    """
    if _first_process and _first_process[0] != os.getpid():
        raise ConfigError(
            "this process was forked from one that has used a store, so it cannot use stores: start it by "
            "spawn or forkserver (multiprocessing.set_start_method), or use stores only in the forked process"
        )
    _first_process[:] = [os.getpid()]


def _parse_metadata(meta: ObjectMeta) -> Found:
    # Without an ETag: the modification time, in whole seconds as in HTTP.
    return Found(meta["size"], meta["e_tag"] or int(meta["last_modified"].timestamp()))


def _is_refused(error: Exception) -> bool:
    """Return True if the store refuses this request."""
    kinds = _obstore().exceptions
    refused = (kinds.PermissionDeniedError, kinds.UnauthenticatedError, kinds.NotSupportedError)
    return isinstance(error, refused) or re.search(r"status code: (40[0135]|501)", str(error)) is not None


@contextlib.contextmanager
def _errors(failed: str, removed: str = "") -> Iterator[None]:
    """Convert obstore errors to a ReadError."""
    try:
        yield
    except (ReadError, ConfigError):
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(removed or f"{failed}: {error_text(error)}") from None
    except Exception as error:
        if not (remedy := _remedy(error)):
            raise ReadError(f"{failed}: {error_text(error)}; try again when the store answers") from None
        raise ReadError(f"{failed}: {error_text(error)}; {remedy}") from None


def _remedy(error: Exception) -> str:
    kinds, text = _obstore().exceptions, str(error)
    if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)):
        return "give credentials that may read it, as its own tools expect them (see docs/stores.md)"
    if isinstance(error, kinds.NotSupportedError) or "NotPartial" in text:
        return "the server sends no byte ranges: copy the checkpoint to a local directory"
    if "InvalidCertificate(" in text:
        return "set SSL_CERT_FILE to the certificate of its authority; it replaces the system's certificates"
    return ""


def error_text(error: Exception) -> str:
    """Return an obstore error without secrets."""
    text, _, debugging = str(error).partition("\n\nDebug source")
    if "error sending request" in text and (reasons := [*_REASON.finditer(debugging)]):
        address, reason = _ADDRESS.search(debugging), reasons[-1]
        words = reason[1] or f"{'certificate' if reason[2] == 'Certificate' else 'no TLS'}: {reason[3]}"
        text += f" ({address[1] + ': ' if address else ''}{words})"
    # The body of a response may repeat the request with its credentials: keep only the name of its error.
    if answer := re.match(r".*?status code: [\w '-]+", text, re.DOTALL):
        code = re.search(r"<Code>(\w{1,60})</Code>", text)
        text = answer[0] + (f": {code[1]}" if code else "")
    return without_secrets(" ".join(text.split()))[:400]
