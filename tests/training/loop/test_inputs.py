"""Ranks with other data or another configuration are told so, all of them, before anything is loaded."""

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
    """The configuration of a run whose data lie in a folder of each rank's own, with two files."""
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
    """A run in which this rank reads its own copy of the data, with its own changes."""
    from zerostart.training.loop.runner import train

    rank = int(os.environ["RANK"])
    folder = Path(values["task"]["source"], f"rank{rank}")
    own = {**values, "task": {**values["task"], "source": str(folder)}}
    for section, keys in changes.get(rank, {}).items():
        own[section] = {**own[section], **keys}
    return train(parse_config(own)).steps


def refusals(values, changes=None, ranks=3):
    """The one text with which all ranks end."""
    outcomes = rank_outcomes(run, ranks, values, changes or {}, timeout=60, grace=20)
    assert [outcome.error for outcome in outcomes] == ["zerostart.errors.ConfigError"] * ranks, outcomes
    (text,) = {outcome.message for outcome in outcomes}
    return text


@pytest.mark.slow
def test_copies_of_the_same_data_will_do(values):
    assert run_ranks(run, 2, values, {}) == [2, 2]


@pytest.mark.slow
def test_a_rank_with_fewer_lines_is_named_with_its_file(values, tmp_path):
    (tmp_path / "rank1" / "b.txt").write_text(TEXT * 7)
    text = refusals(values)
    assert "rank 1: 55 sequences of 880 tokens" in text
    assert "ranks 0, 2: 65 sequences of 1,040 tokens" in text
    assert "copy the same files" in text


@pytest.mark.slow
def test_the_same_number_of_other_tokens_is_found(values, tmp_path):
    (tmp_path / "rank0" / "a.txt").write_text(TEXT.replace("cat", "rat") * 10)
    assert "rank 0: 65 sequences of 1,040 tokens" in refusals(values)


@pytest.mark.slow
def test_a_rank_without_data_stops_all(values, tmp_path):
    shutil.rmtree(tmp_path / "rank1")
    assert refusals(values, ranks=2).startswith(f"rank 1: task.source {tmp_path}/rank1: no such file")


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        ("train", "steps", 3, "train.steps (ranks 0, 2: 2; rank 1: 3)"),
        ("task", "packing", False, "task.packing (ranks 0, 2: True; rank 1: False)"),
        ("engine", "config", {"wrap": ["A"]}, "engine.config"),
        # Each export is a collective.
        pytest.param("output", "every", 1, "output.every (ranks 0, 2: 0; rank 1: 1)", marks=pytest.mark.slow),
    ],
)
def test_another_configuration_is_named_by_its_key(values, section, key, value, told):
    text = refusals(values, {1: {section: {key: value}}})
    assert "the ranks are configured differently: " in text
    assert told in text


@pytest.mark.slow
def test_another_tokenizer_is_named(values, tokenizer_path, tmp_path):
    other = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_path, other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"Å"'))
    assert "differently: the tokenizer (" in refusals(values, {1: {"task": {"tokenizer": str(other)}}}, 2)
