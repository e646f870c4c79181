"""Uploads to S3 and to stores that speak it, by botocore: obstore does not tell the id of an upload."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from zerostart.checkpoint.storage.aws_profiles import has_endpoint
from zerostart.checkpoint.storage.uploads import (
    ANYTHING,
    MARK,
    REMOVING,
    Before,
    GoneError,
    MayNotRemoveError,
    Stored,
    TakenError,
    Unfinished,
    Uploads,
    told,
)
from zerostart.errors import ConfigError, WriteError

#: Attempts of a request, with back-off up to 20 seconds between them: a store may be away for half a minute.
ATTEMPTS = 8
#: Objects that one request removes.
_TOGETHER = 1000
_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


@dataclass(frozen=True)
class S3Uploads(Uploads):
    """See ``Uploads``: multipart uploads, which AWS's documentation describes (CreateMultipartUpload)."""

    shared = True

    @classmethod
    def of(cls, url: str) -> S3Uploads:
        """The directory at a URL. Raises ConfigError where it names no bucket, or botocore is missing."""
        made = cls(url.rstrip("/"))
        if not made._bucket:
            raise ConfigError(f"{url}: names no bucket; write s3://NAME/DIRECTORY")
        _ = made._client
        return made

    def at(self, url: str) -> Uploads:
        """See ``Uploads``."""
        return replace(self, url=url.rstrip("/"))

    def listed(self, folder: str = "") -> dict[str, Stored]:
        """See ``Uploads``."""
        found: dict[str, Stored] = {}
        for page in self._pages("list_objects_v2", "ContinuationToken", Prefix=self._key(folder, "/")):
            for one in page.get("Contents", ()):
                name = one["Key"][len(self._begin) :]
                found[name] = Stored(one["Size"], one["ETag"], one["LastModified"].timestamp())
        return found

    def folders(self, most: int | None = None) -> list[str]:
        """See ``Uploads``."""
        found: list[str] = []
        for page in self._pages("list_objects_v2", "ContinuationToken", Prefix=self._begin, Delimiter="/"):
            found += [one["Prefix"][len(self._begin) : -1] for one in page.get("CommonPrefixes", ())]
            if most is not None and len(found) >= most:
                break
        return found

    def read(self, name: str) -> tuple[bytes, str] | None:
        """See ``Uploads``."""
        from botocore.exceptions import ClientError

        with self._errors(name, "reading"):
            for attempt in range(ATTEMPTS):
                try:
                    answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
                    return answer["Body"].read(), answer["ETag"]
                except ClientError as error:
                    if _code(error) in ("NoSuchKey", "404"):
                        return None
                    raise
                except Exception:  # an answer that broke off, which the library does not ask for again
                    if attempt == ATTEMPTS - 1:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def mark_of(self, name: str) -> str:
        """See ``Uploads``."""
        from botocore.exceptions import ClientError

        with self._errors(name, "looking at"):
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
            except ClientError as error:
                if _code(error) in ("NoSuchKey", "404"):
                    return ""
                raise
        return str(found.get("Metadata", {}).get(MARK, ""))

    def put(self, name: str, data: bytes, before: Before = ANYTHING) -> str:
        """See ``Uploads``."""
        try:
            with self._errors(name, "uploading"):
                answer = self._conditional(
                    self._client.put_object, before, Bucket=self._bucket, Key=self._key(name), Body=data
                )
        except TakenError:
            # An attempt whose answer was lost has made it: then the next one finds its own object there.
            if (there := self.read(name)) is None or there[0] != data:
                raise
            return there[1]
        tag: str = answer["ETag"]
        return tag

    def remove(self, names: Collection[str]) -> None:
        """See ``Uploads``. One by one where there are few: not every store takes lists."""
        keys = [self._key(name) for name in names]
        for at in range(0, len(keys), _TOGETHER):
            batch = keys[at : at + _TOGETHER]
            with self._errors(next(iter(names)), REMOVING):
                if len(batch) <= 16:
                    for key in batch:
                        self._client.delete_object(Bucket=self._bucket, Key=key)
                    continue
                wanted = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            for failed in answer.get("Errors", ()):
                kind = MayNotRemoveError if failed.get("Code") == "AccessDenied" else WriteError
                raise kind(f"{failed['Key']}: cannot be removed: {failed.get('Message')}")

    def begin(self, name: str, mark: str = "") -> str:
        """See ``Uploads``."""
        with self._errors(name, "beginning to upload"):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=self._key(name), Metadata={MARK: mark} if mark else {}
            )
        upload: str = answer["UploadId"]
        return upload

    def part(self, name: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """See ``Uploads``."""
        with self._errors(name, f"uploading part {number} of"):
            answer = self._client.upload_part(
                Bucket=self._bucket,
                Key=self._key(name),
                UploadId=upload,
                PartNumber=number + 1,
                Body=data,
            )
        receipt: str = answer["ETag"]
        return receipt

    def complete(
        self, name: str, upload: str, receipts: Mapping[int, str], mark: str = "", before: Before = ANYTHING
    ) -> None:
        """See ``Uploads``."""
        parts = [{"PartNumber": number + 1, "ETag": receipts[number]} for number in sorted(receipts)]
        try:
            with self._errors(name, "completing"):
                self._conditional(
                    self._client.complete_multipart_upload,
                    before,
                    Bucket=self._bucket,
                    Key=self._key(name),
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                )
        except (GoneError, TakenError):
            # As with ``put``: of one length are the files of all saves of one model.
            if not mark or self.mark_of(name) != mark:
                raise

    def abort(self, name: str, upload: str) -> None:
        """See ``Uploads``."""
        try:
            with self._errors(name, "aborting the upload of"):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._key(name), UploadId=upload)
        except GoneError:
            return

    def unfinished(self) -> list[Unfinished]:
        """See ``Uploads``."""
        found: list[Unfinished] = []
        more: dict[str, str] = {}
        while True:
            with self._errors("", "listing unfinished uploads of"):
                page = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._begin, **more)
            found += [
                Unfinished(one["Key"][len(self._begin) :], one["UploadId"], one["Initiated"].timestamp())
                for one in page.get("Uploads", ())
                if one["Key"].startswith(self._begin)
            ]
            if not page.get("IsTruncated"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    @property
    def _bucket(self) -> str:
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def _begin(self) -> str:
        """What all keys begin with."""
        folder = self.url.partition("://")[2].partition("/")[2].strip("/")
        return f"{folder}/" if folder else ""

    def _key(self, name: str, end: str = "") -> str:
        return self._begin + (f"{name}{end}" if name else "")

    @property
    def _client(self) -> Any:
        taken = ("AWS_", "SSL_CERT_FILE")
        return _client(tuple(sorted(item for item in os.environ.items() if item[0].startswith(taken))))

    def _pages(self, call: str, token: str, **asked: str) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            with self._errors("", "listing"):
                page = getattr(self._client, call)(Bucket=self._bucket, **asked, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {token: page[f"Next{token}"]}

    def _conditional(self, call: Any, before: Before, **asked: Any) -> dict[str, Any]:
        """A request that makes an object, on a condition; without it at a store that knows none."""
        from botocore.exceptions import ClientError

        condition: dict[str, Any] = {}
        if before is None:
            condition = {"IfNoneMatch": "*"}
        elif isinstance(before, str):
            condition = {"IfMatch": before}
        try:
            answer: dict[str, Any] = call(**asked, **condition)
        except ClientError as error:
            if not condition or _code(error) not in ("NotImplemented", "501"):
                raise
            answer = call(**asked)
        return answer

    @contextmanager
    def _errors(self, name: str, doing: str) -> Iterator[None]:
        """What the library raises as our errors."""
        from botocore.exceptions import BotoCoreError, ClientError

        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except ClientError as error:
            if _code(error) in _TAKEN:
                raise TakenError(f"{where}: {told(error)}") from error
            if _code(error) == "NoSuchUpload":
                raise GoneError(f"{where}: its upload was aborted by somebody else") from error
            denied = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (401, 403)
            hint = "; give credentials that may, as AWS's own tools take them (see docs/stores.md)"
            kind = MayNotRemoveError if denied and doing == REMOVING else WriteError
            raise kind(f"{doing} {where} failed: {told(error)}{hint if denied else ''}") from error
        except (BotoCoreError, OSError) as error:
            raise WriteError(f"{doing} {where} failed: {told(error)}") from error


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code"))


@functools.lru_cache(maxsize=4)
def _client(settings: tuple[tuple[str, str], ...]) -> Any:
    """A client with the user's credentials, region and endpoint; threads share it."""
    try:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(
            "saving to s3:// is done by botocore, which is not installed: pip install 'zerostart[stores]'"
        ) from error
    from botocore.exceptions import BotoCoreError

    known = dict(settings)
    # As obstore takes them, by which the same URLs are read.
    endpoint = known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL") or known.get("AWS_ENDPOINT")
    own = known.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() not in ("true", "1")
    unsigned = known.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")
    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 64,
        # Stores of others do not know the newer checksums; TLS or the signature covers the bytes.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **({"s3": {"addressing_style": "path"}} if has_endpoint(known) and own else {}),
        **({"signature_version": UNSIGNED} if unsigned else {}),
    }
    session = botocore.session.Session()
    try:
        region = known.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        # The authorities that reads trust, where AWS's own setting names none.
        trusted = session.get_config_variable("ca_bundle") or known.get("SSL_CERT_FILE")
        return session.create_client(
            "s3", region_name=region, endpoint_url=endpoint or None, verify=trusted, config=Config(**options)
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"s3://: the store cannot be reached: {told(error)}") from error
