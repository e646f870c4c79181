"""Ranks with different data or configurations all fail before the load."""

import os
import shutil
from pathlib import Path

import pytest

from tests.ranks import rank_outcomes, run_ranks
from tests.training.language import CAUSAL
from zerostart.training.config.load import parse_config

TEXT = "the cat sat on the mat, and the dog sat on the cat. "


@pytest.fixture
def values(checkpoints, tokenizer_path, tmp_path):
    """Configuration of a run whose ranks read different folders of two files."""
    for rank in range(3):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "a.txt").write_text(TEXT * 10)
        (tmp_path / f"rank{rank}" / "b.txt").write_text(TEXT * 10)
    return {
        "model": {"source": str(checkpoints("qwen3"))},
        "task": {
            "name": CAUSAL,
            "source": str(tmp_path),
            "tokenizer": str(tokenizer_path),
            "sequence_length": 16,
        },
        "engine": {"name": "fsdp2"},
        "train": {"steps": 2, "batch_size": 1},
        "output": {"directory": str(tmp_path / "out")},
    }


def run(values, changes):
    """Run on this rank's copy of the data, with this rank's changes."""
    from zerostart.training.loop.runner import train

    rank = int(os.environ["RANK"])
    folder = Path(values["task"]["source"], f"rank{rank}")
    config = {**values, "task": {**values["task"], "source": str(folder)}}
    for section, keys in changes.get(rank, {}).items():
        config[section] = {**config[section], **keys}
    return train(parse_config(config)).steps


def catch_error(values, changes=None, ranks=3):
    """Return the error text, which all ranks share."""
    outcomes = rank_outcomes(run, ranks, values, changes or {}, timeout=60, grace=20)
    assert [outcome.error for outcome in outcomes] == ["zerostart.errors.ConfigError"] * ranks, outcomes
    (text,) = {outcome.message for outcome in outcomes}
    return text


@pytest.mark.slow
def test_equal_copies_of_the_data_are_accepted(values):
    assert run_ranks(run, 2, values, {}) == [2, 2]


def test_a_rank_with_other_data_stops_all(values, tmp_path):
    (tmp_path / "rank1" / "b.txt").write_text(TEXT.replace("cat", "rat") * 10)
    assert "the ranks differ in the data (rank 0: " in catch_error(values, ranks=2)


@pytest.mark.slow
def test_a_rank_without_data_stops_all(values, tmp_path):
    shutil.rmtree(tmp_path / "rank1")
    assert catch_error(values, ranks=2).startswith(f"rank 1: task.source {tmp_path}/rank1: no such file")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "steps", 3, "train.steps (rank 0: 2; rank 1: 3)"),
        ("task", "packing", False, "task.packing (rank 0: True; rank 1: False)"),
        ("engine", "config", {"wrap": ["A"]}, "engine.config"),
        # Each export is a collective.
        pytest.param("output", "every", 1, "output.every (rank 0: 0; rank 1: 1)", marks=pytest.mark.slow),
    ],
)
def test_another_configuration_is_named_by_its_key(values, section, key, value, message):
    text = catch_error(values, {1: {section: {key: value}}})
    assert f"the ranks differ in {message}" in text
