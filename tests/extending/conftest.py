"""The shipped conformance classes fork their ranks from the server of this suite, which has imported more."""

import pytest

from tests.ranks import start_server


@pytest.fixture(scope="package", autouse=True)
def server() -> None:
    start_server()
