"""Stores behind URLs pass the conformance suite."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stores import servers
from zerostart.testing import StorageConformance


@pytest.mark.slow
class TestWeb(StorageConformance):
    """A web server without listing and ETags."""

    @contextmanager
    def served(self, folder: Path) -> Iterator[servers.UrlOf]:
        with servers.rclone(folder, "http") as address:
            yield lambda name: f"{address}/{name}"


@pytest.mark.slow
class TestWebDAV(StorageConformance):
    @contextmanager
    def served(self, folder: Path) -> Iterator[servers.UrlOf]:
        with servers.rclone(folder, "webdav") as address:
            yield lambda name: f"{address}/{name}"


@pytest.mark.slow
class TestSeaweed(StorageConformance):
    endpoint: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls) -> Iterator[None]:
        with servers.s3() as cls.endpoint:
            yield

    @contextmanager
    def served(self, folder: Path) -> Iterator[servers.UrlOf]:
        with servers.set_environment(servers.environment(self.endpoint)):
            self.follow(folder)
            yield lambda name: f"s3://{servers.BUCKET}/some/model/{name}"

    def follow(self, folder: Path) -> None:
        servers.upload(folder, self.endpoint, "some/model")
