"""What saves to a URL go to passes what it has to pass, by real servers of this machine."""

import functools
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stores import servers
from zerostart.checkpoint.storage import by_obstore, uploads_at
from zerostart.checkpoint.storage.obstore_uploads import ObstoreUploads
from zerostart.checkpoint.storage.uploads import Uploads
from zerostart.testing import UploadsConformance


class S3(UploadsConformance):
    kind: str
    endpoint: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls) -> Iterator[None]:
        with servers.s3(cls.kind) as cls.endpoint:
            yield

    @contextmanager
    def place(self) -> Iterator[Uploads]:
        with servers.environed(servers.environment(self.endpoint)):
            found = uploads_at(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}/place/")
            assert found is not None
            yield found


@pytest.mark.skipif(not servers.has("weed"), reason="SeaweedFS is not installed")
class TestSeaweed(S3):
    kind = "weed"


@pytest.mark.slow
@pytest.mark.skipif(not servers.has("weed"), reason="SeaweedFS is not installed")
class TestStreams(S3):
    """The way of ``gs://`` and ``az://``, on an S3 server."""

    kind = "weed"

    @contextmanager
    def place(self) -> Iterator[Uploads]:
        root = f"s3://{servers.BUCKET}/"
        with servers.environed(servers.environment(self.endpoint)):
            reach = functools.partial(by_obstore.writable, root)
            yield ObstoreUploads(f"{root}{uuid.uuid4().hex}/place", root=root, reach=reach)


@pytest.mark.slow
@pytest.mark.skipif(not servers.has("moto_server"), reason="moto's server is not installed")
class TestMoto(S3):
    kind = "moto"


class TestWebDAV(UploadsConformance):
    @contextmanager
    def place(self) -> Iterator[Uploads]:
        with (
            tempfile.TemporaryDirectory() as folder,
            servers.rclone(Path(folder), "webdav", "--dir-cache-time", "5m") as address,
        ):
            found = uploads_at(f"{address}/a b/place/")
            assert found is not None
            yield found


class TestFsspec(UploadsConformance):
    @contextmanager
    def place(self) -> Iterator[Uploads]:
        with tempfile.TemporaryDirectory() as folder:
            found = uploads_at(f"file://{folder}/a b/place")
            assert found is not None
            yield found


class TestMemory(UploadsConformance):
    """A file system of fsspec that knows no times but that of making."""

    @contextmanager
    def place(self) -> Iterator[Uploads]:
        found = uploads_at(f"memory://{uuid.uuid4().hex}/place")
        assert found is not None
        yield found


del S3
