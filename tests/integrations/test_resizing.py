"""Resize the embeddings of a sharded model, and train as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints, minilm_path
from zerostart.errors import EngineError

MODELS = {
    "qwen3": "AutoModelForCausalLM",
    "qwen3_moe_aligned": "AutoModelForCausalLM",
    "minilm": "AutoModelForMaskedLM",
}
#: New number of tokens, relative to the old one; multiple; and whether new rows have the mean of the old.
CHANGES = {"more": (9, None, True), "fewer": (-8, None, True), "padded": (3, 64, False)}


def change(model: Any, more: int, multiple: int | None, mean: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    count = model.config.get_text_config().vocab_size + more  # a partitioned weight has no shape
    return model.resize_token_embeddings(count, pad_to_multiple_of=multiple, mean_resizing=mean)


def train(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batch_of(model: Any) -> torch.Tensor:
    """Return tokens up to the last one, which may be a new one."""
    count = model.config.get_text_config().vocab_size
    return torch.arange(count - 32, count).reshape(4, 8)


def resize_sharded(path: Path, kind: str, edit: tuple[Any, ...]) -> dict[str, Any]:
    import transformers

    rank = torch.distributed.get_rank()
    torch.manual_seed(3)  # for the head that a checkpoint may lack
    with zerostart.enabled(engine="fsdp2"):
        model = getattr(transformers, MODELS[kind]).from_pretrained(path)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    resized = change(model, *edit, seed=7 + rank)  # Rank 0 draws for everyone.
    assert resized is model.get_input_embeddings() is embeddings
    assert model.get_output_embeddings() is head
    start = {name: tensor.clone() for name, tensor in zerostart.full_tensors(model, rank=None)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    losses = train(model, optimizer, batch_of(model))
    end = dict(zerostart.full_tensors(model, rank=None))
    with pytest.raises(zerostart.ZerostartError, match="after FSDP2 has run a forward"):
        model.resize_token_embeddings(len(embeddings.weight) + 1)
    sizes = [embeddings.num_embeddings, getattr(head, "out_features", None), model.config.vocab_size]
    return {"start": start, "losses": losses, "end": end, "sizes": sizes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "edit"),
    [("qwen3", "fewer"), ("qwen3", "padded"), ("qwen3_moe_aligned", "more"), ("minilm", "more")],
)
def test_resizing_equals_the_unsharded_model(kind: str, edit: str, checkpoints: TinyCheckpoints) -> None:
    compare(minilm_path() if kind == "minilm" else checkpoints(kind), kind, CHANGES[edit])


def compare(path: Path, kind: str, edit: tuple[Any, ...]) -> None:
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, MODELS[kind]).from_pretrained(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks: it changes the covariance of the rows
    change(model, *edit, seed=7)
    torch.set_num_threads(threads)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model.eval(), optimizer, batch_of(model))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    for result in run_ranks(resize_sharded, 2, path, kind, edit):
        assert {n for n in start if not torch.equal(start[n], result["start"][n])} == set()
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result["end"][name], tensor, rtol=1e-4, atol=1e-6)
        expected = [embeddings.num_embeddings, getattr(head, "out_features", None), model.config.vocab_size]
        assert result["sizes"] == expected


def check_partitions(path: Path, folder: Path, edits: list[str]) -> None:
    """Load at ZeRO-3 without a configuration for transformers: by ``load``, or by ``enabled(engine=...)``."""
    import deepspeed
    import transformers

    for number, edit in enumerate(edits):
        plain = transformers.AutoModelForCausalLM.from_pretrained(path)
        change(plain, *CHANGES[edit], seed=7)
        expected = plain.state_dict()
        if number % 2:
            model: Any = zerostart.load(path, progress=False)
        else:
            with zerostart.enabled(engine="deepspeed", zero_stage=3):
                model = transformers.AutoModelForCausalLM.from_pretrained(path)
        resized = change(model, *CHANGES[edit], seed=7 + torch.distributed.get_rank())
        assert resized is model.get_input_embeddings()
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config["zero_allow_untested_optimizer"] = True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        tensors = dict(zerostart.full_tensors(engine, rank=None))
        assert {name for name in expected if not torch.equal(tensors[name], expected[name])} == set()
        zerostart.save(engine, folder / edit)
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder / edit).state_dict()
        assert {name for name in expected if not torch.equal(saved[name], expected[name])} == set()
        batch = batch_of(model)
        loss = engine(input_ids=batch, labels=batch).loss
        assert loss.item() == pytest.approx(plain(input_ids=batch, labels=batch).loss.item(), rel=1e-5)
        engine.backward(loss)
        engine.step()
        with pytest.raises(zerostart.ZerostartError, match=r"resize them before deepspeed\.initialize"):
            model.resize_token_embeddings(len(expected) + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "edits"), [("qwen3", ["more"]), ("qwen3_moe_aligned", list(CHANGES))])
def test_zero3_partitions_are_resized(
    kind: str, edits: list[str], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run_ranks(check_partitions, 2, checkpoints(kind), tmp_path, edits)


def check_inner_models(path: Path, tied: Path) -> None:
    """``resize_token_embeddings`` of the decoder, as scripts of composite models call it."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    change(plain.model, *CHANGES["more"], seed=7)
    expected = plain.state_dict()
    for engine in ("fsdp2", "deepspeed"):
        with zerostart.enabled(engine=engine):
            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            tied_model = transformers.AutoModelForCausalLM.from_pretrained(tied)
        change(model.model, *CHANGES["more"], seed=7 + torch.distributed.get_rank())
        tensors = dict(zerostart.full_tensors(model, rank=None))
        assert {name for name in expected if not torch.equal(tensors[name], expected[name])} == set()
        with pytest.raises(EngineError, match=r"lm_head of .*Qwen3ForCausalLM has the same weight"):
            tied_model.model.resize_token_embeddings(120)


@pytest.mark.slow
def test_inner_models_are_resized(checkpoints: TinyCheckpoints) -> None:
    run_ranks(check_inner_models, 2, checkpoints("qwen3_moe_aligned"), checkpoints("qwen3"))
