"""Object stores and web servers by obstore (the object_store crate): S3, Google, Azure, HTTP, WebDAV."""

from __future__ import annotations

import base64
import functools
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit, urlunsplit

from zerostart.checkpoint.manifest import MARKERS
from zerostart.checkpoint.paths import shown_url, without_secrets
from zerostart.checkpoint.storage.aws_profiles import settings_of
from zerostart.checkpoint.storage.objects import (
    PIECE,
    Bucket,
    ChangedError,
    Found,
    ObjectFiles,
    PassingError,
    RefusedError,
    patience,
)
from zerostart.checkpoint.storage.obstore_uploads import ObstoreUploads
from zerostart.checkpoint.storage.s3_uploads import ATTEMPTS, S3Uploads
from zerostart.checkpoint.storage.uploads import Uploads
from zerostart.checkpoint.storage.webdav_uploads import WebDavUploads
from zerostart.errors import ConfigError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

#: Statuses that a later attempt may not meet, as all of 500 and above.
_PASSING = (408, 409, 425, 429)
_STATUS = re.compile(r"status code: (\d{3})")
#: What the crate says where it has nothing to do with the server's state.
_FINAL = ("NotPartial", "MissingRegion", "InvalidUrl", "UnknownUrlScheme", "builder error", "MissingBucket")
#: The same of an answer to the question for a list that is none: of a page, where any question gets one.
_NO_LIST = "Error decoding PROPFIND response"
#: What its errors say of a TLS certificate that is not trusted, has expired or is of another server; and, of
#: a request that was not sent, to which address and why, which only their debugging text has.
_UNTRUSTED = "InvalidCertificate("
_UNSENT = "error sending request"
_WHERE = re.compile(r'"tcp connect error",\s*([^\s,]+),')
_WHY = re.compile(r'(?:message|error): "([^"]+)"|Invalid(Certificate|Message)\(\s*(\w+)')
#: An answer may take long, but not stand still: for so many seconds, of a request that writes. Until that has
#: been sent, nothing comes either.
_LONGEST, _STILL, _UNREACHED = 3600.0, 60.0, 10.0
_WEB = ("http", "https")
_AWS = ("s3", "s3a")


@dataclass(frozen=True)
class ObstoreFiles(ObjectFiles):
    """See ``ObjectFiles``."""

    schemes = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")

    @classmethod
    def places(cls, source: str) -> tuple[str, str, str]:
        """See ``ObjectFiles``. A query is a signature, and stays with the base."""
        url = urlsplit(source)
        scheme, key = url.scheme.lower(), url.path.strip("/")
        if not url.netloc:
            raise ConfigError(
                f"{shown_url(source)}: names no bucket or server; write {scheme}://NAME/DIRECTORY"
            )
        if scheme not in _WEB and url.password is not None:
            raise ConfigError(
                f"{shown_url(source)}: credentials are not taken out of a URL; give them as the "
                "provider's own tools take them (see docs/stores.md)"
            )
        if scheme not in _WEB:
            # Not parsed further: what is after the bucket is a key, whatever signs it has.
            begin, _, key = source.partition("://")[2].partition("/")
            return f"{scheme}://{begin}/", f"{scheme}://{begin}", key.strip("/")
        # What follows a # is no part of what a URL names, and a line's end is dropped where one is parsed.
        if "#" in source or re.search(r"[\t\r\n]", source):
            raise ConfigError(
                f"{shown_url(source)}: has a #, or the end of a line, in it, and would name something else; "
                "write %23 for a # in a name"
            )
        base = urlunsplit((scheme, url.netloc, "/", url.query, ""))
        return f"{scheme}://{url.netloc.rpartition('@')[2]}/", base, unquote(key)

    @property
    def is_saved_to(self) -> bool:
        """See ``Storage``: on the web by what saves leave there."""
        return self.root.partition(":")[0] not in _WEB or bool({*MARKERS} & {*self.names()})

    def bucket(self) -> Bucket:
        """See ``ObjectFiles``. Raises ConfigError in a forked process, too."""
        _check_process()
        return _bucket(self.base, _settings(), patience() / 2)

    @classmethod
    def uploads(cls, url: str) -> Uploads:
        """See ``Storage``. Of web servers those that speak WebDAV."""
        root, base, key = cls.places(url)
        scheme = root.partition(":")[0]
        # Stores and libraries make others of these: what is written would not be found again.
        if key and ({"", ".", ".."} & {*key.split("/")} or re.search(r"[\x00-\x1f\x7f\\]", key)):
            raise ConfigError(
                f"{shown_url(url)}: the names of its directories cannot be empty, . or .., nor have a "
                "backslash or a control character in them; name another directory"
            )
        if scheme in _AWS:
            return S3Uploads.of(f"{root}{key}")
        _require(scheme)
        if scheme in _WEB:
            if urlsplit(base).query:
                raise ConfigError(
                    f"{shown_url(url)}: a URL that is signed is of one file, and a save makes several; "
                    "save to a local directory, or to s3://, gs:// or az://"
                )
            reach = functools.partial(writable, base)
            password = unquote(urlsplit(base).netloc.rpartition("@")[0])
            return WebDavUploads(f"{root}{key}".rstrip("/"), root=root, reach=reach, password=password)
        return ObstoreUploads(f"{root}{key}".rstrip("/"), root=root, reach=functools.partial(writable, base))


class _NoRangeError(RefusedError):
    """The server does not give a range of this object."""


@functools.lru_cache(maxsize=8)
def _bucket(base: str, settings: tuple[tuple[str, str], ...], still: float) -> Bucket:
    # By the environment too: it has the credentials and the endpoint.
    return _Obstore(base, dict(settings), still)


class _Obstore(Bucket):
    """A store; its connections are shared by all threads of the process.

    A request ends that gets no byte for ``still`` seconds.
    """

    def __init__(self, base: str, settings: Mapping[str, str], still: float) -> None:
        scheme = base.partition(":")[0]
        self._obstore, self._web = _require(scheme), scheme in _WEB
        self._lists = not urlsplit(base).query
        self._still = still
        # Whether it compares tags as it should; see ``stream``.
        self._compares = True
        # Attempts are counted and told by the reader: the crate makes one.
        self._store = _connected(base, settings, 1, still)

    def list(self, folder: str) -> dict[str, int] | None:
        """See ``Bucket``. A server that signs URLs one by one, or forbids lists, has none."""
        listed = self._listed(folder)
        if listed is None:
            return None
        found = {one["path"]: one["size"] for one in listed["objects"]}
        # A web server that knows no such question may say that there is nothing.
        return found if found or not self._web else None

    def folders(self, folder: str) -> Sequence[str]:
        """See ``Bucket``."""
        listed = self._listed(folder)
        return [] if listed is None else [one.rstrip("/") for one in listed["common_prefixes"]]

    def _listed(self, folder: str) -> Any:
        """What lies right below a folder; None where nobody is told."""
        if not self._lists:
            return None
        try:
            listed: Any = self._obstore.list_with_delimiter(self._store, f"{folder}/" if folder else None)
        except FileNotFoundError:
            listed = {"objects": [], "common_prefixes": []}
        except Exception as error:
            fault = self._fault(error)
            if isinstance(fault, RefusedError) or _NO_LIST in str(error):
                return None
            raise fault from None
        return listed

    def find(self, key: str) -> Found | None:
        """See ``Bucket``. Where a URL is signed for reading alone, by a byte of the object."""
        try:
            return _found(self._obstore.head(self._store, key))
        except FileNotFoundError:
            return None
        except Exception as error:
            fault = self._fault(error)
            if isinstance(fault, PassingError):
                raise fault from None
            if self._lists:
                raise fault from None
        try:
            return _found(self._obstore.get(self._store, key, options={"range": (0, 1)}).meta)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._fault(error) from None

    def begin(self, key: str, length: int) -> tuple[Found, bytes] | None:
        """See ``Bucket``. Of an empty object there is no range, and its length has to be asked for."""
        if not length:
            return super().begin(key, length)
        try:
            answer = self._obstore.get(self._store, key, options={"range": (0, length)})
            found, head = _found(answer.meta), bytes(answer.bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            fault = self._fault(error)
            # Some servers say that there is no such range, others answer with all of it, which is nothing.
            if isinstance(fault, _NoRangeError) and (empty := self.find(key)) and not empty.size:
                return empty, b""
            raise fault from None
        if left := min(length, found.size) - len(head):
            raise PassingError(f"the answer broke off {left} bytes before its end")
        return found, head

    def stream(self, key: str, begin: int, end: int, known: Found | None) -> Iterator[bytes]:
        """See ``Bucket``. The answer itself says what it is of: not every server knows conditions."""
        options: dict[str, Any] = {"range": (begin, end)}
        # A weak tag is equal to nothing, by the rules of such a condition.
        tag = known.mark if known is not None else None
        if isinstance(tag, str) and tag.startswith('"') and self._compares:
            options["if_match"] = tag
        try:
            try:
                answer = self._obstore.get(self._store, key, options=options)
            except self._obstore.exceptions.PreconditionError:
                if self.find(key) != known:
                    raise ChangedError(f"its ETag is not {tag} any more") from None
                # Tags are quoted (RFC 9110, 8.8.3); it gave one that is not, and compares the letters.
                self._compares = False
                options.pop("if_match", None)
                answer = self._obstore.get(self._store, key, options=options)
            found = _found(answer.meta)
            if known is not None and found != known:
                raise ChangedError(
                    f"it has {found.size} bytes now and had {known.size}"
                    if found.size != known.size
                    else f"its ETag is {found.mark} and was {known.mark}"
                )
            yield from answer.stream(min_chunk_size=PIECE)
        except (FileNotFoundError, ChangedError, PassingError, RefusedError, GeneratorExit):
            raise
        except Exception as error:
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> PassingError | RefusedError:
        """An error of the library as one that may pass, or not."""
        kinds = self._obstore.exceptions
        text = str(error)
        status = int(match[1]) if (match := _STATUS.search(text)) else 0
        if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)) or status in (
            401,
            403,
        ):
            return RefusedError(
                f"{_told(error)}; give credentials that may read it, as the provider's own tools take them "
                "(see docs/stores.md)"
            )
        if status == 416:
            return _NoRangeError(f"the object is shorter than it was, or empty (416): {_told(error)}")
        if isinstance(error, kinds.NotSupportedError) or "NotPartial" in text:
            return _NoRangeError(
                f"the server gives no ranges of files ({_told(error)}); copy the checkpoint to a local "
                "directory"
            )
        refused = status == 501 or (400 <= status < 500 and status not in _PASSING)
        if refused or isinstance(error, (kinds.InvalidPathError, TypeError, ValueError)):
            return RefusedError(_told(error))
        if _UNTRUSTED in text:
            return RefusedError(
                f"{_told(error)}; give the certificate of its authority: SSL_CERT_FILE=FILE, which is taken "
                "instead of the system's"
            )
        if any(word in text for word in _FINAL):
            return RefusedError(_told(error))
        if "kind: Timeout" in text:
            return PassingError(f"no byte came for {self._still:g} s ({_told(error)})")
        return PassingError(_told(error))


def _require(scheme: str) -> Any:
    try:
        import obstore
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// is reached by obstore, which is not installed: pip install 'zerostart[stores]'"
        ) from error
    return obstore


#: The process that has asked a store, or from which this one was forked after it had.
_asking: list[int] = []


def _check_process() -> None:
    """Raise ConfigError in a process without the threads of the crate, which would wait for them for ever."""
    if _asking and _asking[0] != os.getpid():
        raise ConfigError(
            "this process was forked from one that has asked a store before, and stores cannot be reached "
            "from it: start it by spawn or forkserver (multiprocessing.set_start_method), or ask the store "
            "in it alone"
        )
    _asking[:] = [os.getpid()]


def _connected(base: str, settings: Mapping[str, str], attempts: int, still: float) -> ObjectStore:
    import obstore

    scheme = base.partition(":")[0]
    reached = f"{1000 * min(still, _UNREACHED):.0f}ms"
    client: dict[str, Any] = {
        "timeout": f"{max(_LONGEST, still):.0f}s",
        "read_timeout": f"{1000 * still:.0f}ms",
        "connect_timeout": reached,
    }
    more: dict[str, Any] = {"retry_config": {"max_retries": attempts - 1}}
    if scheme in _AWS:
        more |= settings_of(settings)
    more["client_options"] = client | more.get("client_options", {})
    url = urlsplit(base)
    user, _, host = url.netloc.rpartition("@")
    if scheme in _WEB and user:
        # The crate sends none of a URL's, and has them in its errors.
        name, _, password = user.partition(":")
        pair = base64.b64encode(b":".join((unquote_to_bytes(name), unquote_to_bytes(password))))
        more["client_options"]["default_headers"] = {"authorization": f"Basic {pair.decode()}"}
        base = urlunsplit(url._replace(netloc=host))
    if scheme == "http" or _in_the_clear(settings):
        more["client_options"]["allow_http"] = True
    try:
        store: ObjectStore = obstore.store.from_url(base, **more)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"{shown_url(base)}: the store cannot be reached: {_told(error)}; give what its provider's own "
            "tools take (see docs/stores.md)"
        ) from None
    return store


def _settings() -> tuple[tuple[str, str], ...]:
    """What the environment has of credentials, endpoints and authorities."""
    taken = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_")
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(taken)))


def writable(base: str, seconds: int = 0) -> ObjectStore:
    """The store at ``base``, in whichever process asks, for requests that the crate itself tries again.

    Each may take ``seconds`` until its answer, where that comes when all of a body has been sent.
    """
    _check_process()
    return _writable(base, _settings(), seconds)


@functools.lru_cache(maxsize=8)
def _writable(base: str, settings: tuple[tuple[str, str], ...], seconds: int) -> ObjectStore:
    return _connected(base, dict(settings), ATTEMPTS, seconds or _STILL)


def _found(meta: ObjectMeta) -> Found:
    # Without a tag the time of the last change, in whole seconds as HTTP has it.
    mark: Hashable = meta["e_tag"] or int(meta["last_modified"].timestamp())
    if isinstance(mark, str) and not mark.endswith('"'):
        mark = f'"{mark}"'
    return Found(meta["size"], mark)


def _told(error: Exception) -> str:
    """What the library says, in one line, without what is secret."""
    text, _, debugging = str(error).partition("\n\nDebug source")
    if _UNSENT in text and (why := [*_WHY.finditer(debugging)]):
        address = _WHERE.search(debugging)
        words = why[-1][1] or f"{'certificate' if why[-1][2] == 'Certificate' else 'no TLS'}: {why[-1][3]}"
        text += f" ({address[1] + ': ' if address else ''}{words})"
    if "<Code>" in text:  # the rest of a store's document may be what was signed, with a token
        text = text.partition("<")[0] + ": ".join(re.findall(r"<(?:Code|Message)>([^<]*)", text))
    return without_secrets(" ".join(text.split()))[:400]


def _in_the_clear(settings: Mapping[str, str]) -> bool:
    """Whether the user has named an endpoint without TLS."""
    return any("ENDPOINT" in name and value.startswith("http://") for name, value in settings.items())
