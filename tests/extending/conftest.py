"""Fork the ranks of the conformance tests from this suite's server."""

import pytest

from tests.ranks import start_server


@pytest.fixture(scope="package", autouse=True)
def server() -> None:
    start_server()
