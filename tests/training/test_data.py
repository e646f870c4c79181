"""Documents, packing, special tokens, the held-out part, and the batches of both tasks."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from tests.tiny import minilm_path
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError, ReadError
from zerostart.training.config.configuration import DataConfig
from zerostart.training.config.load import parse_config
from zerostart.training.loop.evaluate import HeldOut, held_out_batches
from zerostart.training.loop.failures import Failures
from zerostart.training.loop.task import task_class
from zerostart.training.tasks.language import IGNORED_LABEL
from zerostart.training.tasks.text import Sequences, iter_documents, split_held_out, tokenize


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(minilm_path())


def language(name="causal-lm", tokenizer=None, **settings):
    """A task of a run with that tokenizer; one that pads with 0 where none is given."""
    given = {"model": {"source": "x"}, "data": {"source": "x"}, "output": {"directory": "x"}}
    config = parse_config(given | {"task": {"name": name, **settings}, "train": {"steps": 1, "seed": 0}})
    task = task_class(name)(config)
    task.tokenizer = tokenizer or type("T", (), {"pad_token_id": 0})
    return task


def test_documents_of_files_and_directories(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    config = DataConfig(source=str(tmp_path), text_field="body")
    assert list(iter_documents(config)) == ["one", "two", "bee"]
    both = DataConfig(source=[str(tmp_path / "b.txt"), str(tmp_path)], text_field="body", documents=2)
    assert list(iter_documents(both)) == ["bee", "one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": 1}', r"a\.jsonl, line 1: no text in field 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{', r"a\.jsonl, line 2: not valid JSON"),
        ("a.txt", b"\xff\xfe", r"a\.txt is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "x \\ud83d y"}', r"a\.jsonl, line 2: half of a surrogate pair"),
    ],
)
def test_malformed_text_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(iter_documents(DataConfig(source=str(tmp_path / name))))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\\ud83e\\udd17"}\r\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfbee")
    assert list(iter_documents(DataConfig(source=str(tmp_path)))) == ["\U0001f917", "bee"]


@pytest.mark.parametrize("packing", [True, False])
def test_empty_documents_are_no_separators(tokenizer, packing):
    config = DataConfig(source="x", sequence_length=16, packing=packing)
    with pytest.raises(ConfigError, match="less than one sequence"):
        tokenize(["", " "] * 100, tokenizer, config)
    some, all_ = ["one two three " * 9] * 2, ["", "one two three " * 9, "", "", "one two three " * 9, ""]
    assert tokenize(all_, tokenizer, config).digest() == tokenize(some, tokenizer, config).digest()


def test_absent_source_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file or directory"):
        list(iter_documents(DataConfig(source=str(tmp_path / "absent"))))
    with pytest.raises(ConfigError, match=r"no \.txt"):
        list(iter_documents(DataConfig(source=str(tmp_path))))


def test_stdlib_docstrings_are_the_same_every_time():
    config = DataConfig(source="stdlib-docstrings", documents=20)
    first = list(iter_documents(config))
    assert first == list(iter_documents(config))
    assert len(first) == 20
    assert all(len(document) >= 80 for document in first)


def test_packing_keeps_every_token_in_order(tokenizer):
    documents = [f"word {'more ' * count}" for count in range(30)]
    config = DataConfig(source="unused", sequence_length=16)
    sequences = tokenize(documents, tokenizer, config)
    expected = []
    for document in documents:
        expected += [*tokenizer(document, add_special_tokens=False)["input_ids"], tokenizer.sep_token_id]
    packed = []
    for item in (sequences[index] for index in range(len(sequences))):
        ids = item["input_ids"].tolist()
        assert len(ids) == 16
        assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert item["special_tokens_mask"].tolist() == [1, *[0] * 14, 1]
        packed += ids[1:-1]
    assert packed == expected[: len(packed)]
    assert len(expected) - len(packed) < 14


def test_without_packing_a_document_is_a_sequence(tokenizer):
    config = DataConfig(source="unused", sequence_length=8, packing=False)
    sequences = tokenize(["one two", "", "a " * 50], tokenizer, config)
    assert [len(sequences[index]["input_ids"]) for index in range(len(sequences))] == [4, 8]
    with pytest.raises(ConfigError, match="less than one sequence"):
        tokenize(["few words"], tokenizer, DataConfig(source="unused", sequence_length=64))


def numbered(count):
    return Sequences(torch.arange(count * 4, dtype=torch.int32), [4 * (index + 1) for index in range(count)])


def test_held_out_part_is_the_end():
    training, held_out = split_held_out(numbered(10), 0.2)
    assert (len(training), len(held_out)) == (8, 2)
    assert training[7]["input_ids"].tolist() == [28, 29, 30, 31]
    assert [held_out[index]["input_ids"].tolist()[0] for index in range(2)] == [32, 36]
    assert split_held_out(numbered(3), 0.0)[1] is None
    with pytest.raises(ConfigError, match="leaves none of 1 sequences"):
        split_held_out(numbered(1), 0.5)


class FakeSession:
    """One rank: the loss of a batch is its first token."""

    device = torch.device("cpu")

    class model:  # stands for an instance
        eval = train = staticmethod(lambda: None)

    def part(self, batch, predicted):
        return batch, predicted

    def forward(self, batch):
        return batch["input_ids"][0, 0].float()

    def sum_over_ranks(self, *values):
        return list(values)


def test_held_out_batches_are_weighted_and_shared_out():
    batches = held_out_batches(language(), numbered(5), batch_size=2, seed=0)
    assert [predicted for _, predicted in batches] == [6, 6, 3]

    def loss(place, count):
        session = FakeSession()
        return HeldOut(batches, place, count).loss(session, Failures(current_world(), session.sum_over_ranks))

    assert loss(0, 1) == pytest.approx((0 * 6 + 8 * 6 + 16 * 3) / 15)
    assert loss(0, 2) == pytest.approx((0 * 6 + 16 * 3) / 9)
    assert loss(1, 2) == 8.0  # and one forward more, with weight 0


def test_held_out_examples_are_read_when_they_are_evaluated():
    """All of them, made and kept, would be the memory of a data set on every rank."""
    read = []

    class Counted(Sequences):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    items = numbered(5)
    held_out = HeldOut(held_out_batches(language(), Counted(items.tokens, items.ends), 1, 0), 1, 2)
    assert read == [0]  # whether one has a weight
    session = FakeSession()
    held_out.loss(session, Failures(current_world(), session.sum_over_ranks))
    assert read == [0, 1, 3, 0]


def test_what_cannot_be_read_of_held_out_examples_is_told_before_the_forward():
    class Damaged(Sequences):
        def __getitem__(self, index):
            if index:
                raise ReadError("damaged")
            return super().__getitem__(index)

    class Session(FakeSession):
        def forward(self, batch):
            pytest.fail("the others would wait here")

    items, session = numbered(2), Session()
    held_out = HeldOut(held_out_batches(language(), Damaged(items.tokens, items.ends), 1, 0), 1, 2)
    with pytest.raises(ReadError, match="damaged"):
        held_out.loss(session, Failures(current_world(), session.sum_over_ranks))


def test_held_out_sequences_without_a_token_to_predict_are_refused():
    """Their loss would be shown as 0."""
    with pytest.raises(ConfigError, match=r"no token to predict.*raise data\.held_out"):
        held_out_batches(
            language(), Sequences(torch.arange(3, dtype=torch.int32), [1, 2, 3]), batch_size=2, seed=0
        )


@pytest.mark.parametrize("name", ["causal-lm", "masked-lm"])
def test_a_batch_without_a_prediction_has_a_finite_loss_and_no_weight(name):
    task = language(name)
    ids = language().collator(0)([{"input_ids": torch.tensor([7])}, {"input_ids": torch.tensor([8])}])[
        "input_ids"
    ]
    empty = {"input_ids": ids, "labels": torch.full_like(ids, IGNORED_LABEL)}
    batch, weight = task.weighed(empty)
    assert weight == 0
    assert task.predicted_tokens(batch["labels"]) == 1
    assert (empty["labels"] == IGNORED_LABEL).all()


def test_causal_batches_pad_without_losing_the_end_token():
    items = [{"input_ids": torch.tensor(ids)} for ids in ([5, 6, 2], [7, 2])]
    task = language(tokenizer=type("T", (), {"pad_token_id": 2}))
    batch = task.collator(0)(items)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["labels"].tolist() == [[5, 6, 2], [7, 2, IGNORED_LABEL]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert task.predicted_tokens(batch["labels"]) == 3


def test_masked_batches_hide_the_same_tokens_for_the_same_seed(tokenizer):
    task = language("masked-lm", tokenizer, mask_probability=0.5)
    sequences = tokenize(["some words " * 40], tokenizer, DataConfig(source="unused", sequence_length=16))
    items = [sequences[index] for index in range(4)]
    first, second = (task.collator(7)(items) for _ in range(2))
    assert torch.equal(first["labels"], second["labels"])
    assert task.predicted_tokens(first["labels"]) == int((first["labels"] != IGNORED_LABEL).sum()) > 0
    assert (first["labels"][:, [0, -1]] == IGNORED_LABEL).all()  # special tokens are never hidden
    assert json.dumps(sorted(first)) == '["attention_mask", "input_ids", "labels"]'


def test_masked_task_needs_a_mask_token():
    task = language("masked-lm", type("T", (), {"mask_token": None}))
    with pytest.raises(ConfigError, match="mask token"):
        task.collator(0)
