from pathlib import Path

import pytest

from tests.parity import checkpoint


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Checkpoint folders by kind of model."""
    return {kind: checkpoint(kind, tmp_path) for kind in ("qwen3", "mixtral")}
