"""Runs of the runner and of the HF Trainer on the same batches: the same losses and weights.

The Trainer's ranks are whole replicas. Where a model is given ``num_items_in_batch`` and leaves it unread, as
BERT does, the Trainer adds up means of batches, which is neither the mean over the predicted tokens of the
step nor the mean of these means; there it is given a loss that divides as its other models' do.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.ranks import run_ranks
from tests.training.language import CAUSAL, MASKED
from zerostart.training.config.load import parse_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Lengths of documents: batches differ in the tokens that they predict.
LENGTHS = (30, 12, 45, 17, 8, 51, 26, 40, 33, 5, 48, 21) * 4
TEXT = "the cat sat on the mat, and the dog sat on the cat."
STEPS, EXACT = 3, 1e-5


@pytest.fixture(scope="module")
def sources(checkpoints, tmp_path_factory):
    """A causal model, and two masked ones without dropout: one whose loss takes what a step predicts."""
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    folder = tmp_path_factory.mktemp("masked")
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 37, "pad_token_id": 0}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(1)
    BertForMaskedLM(BertConfig(**sizes, **none)).save_pretrained(folder / "bert")
    ends = {"bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    ModernBertForMaskedLM(ModernBertConfig(**sizes, **ends)).save_pretrained(folder / "modernbert")
    return {"causal": checkpoints("qwen3"), "bert": folder / "bert", "modernbert": folder / "modernbert"}


def ours(values):
    """A run: the batches of each step as this rank had them, those held out, and losses of both."""
    from zerostart.training.loop import runner
    from zerostart.training.loop.task import task_class

    made = []  # of what is held out, and of what is trained on
    task = task_class(values["task"]["name"])
    collators = task.collator

    def recording(*arguments):
        collate, batches = collators(*arguments), []
        made.append(batches)

        def collating(items):
            batches.append(collate(items))
            return batches[-1]

        collating.generator = getattr(collate, "generator", None)
        return collating

    task.collator = recording
    result = runner.train(parse_config(values))
    lines = map(json.loads, Path(result.directory, "metrics.jsonl").read_text().splitlines())
    held, batches = made
    losses = [line["loss"] for line in lines if "loss" in line]
    return batches[: STEPS * values["train"]["accumulation"]], losses, held, result.held_out


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    """The loss of hidden tokens, as those of transformers that take the number of them have it."""
    total = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


def automatic(values):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForCausalLM if values["task"]["name"] == CAUSAL else AutoModelForMaskedLM


def theirs(source, batches, values, out, own_loss):
    """The Trainer on this rank's ``batches``: losses of rank 0, and weights."""
    from transformers import Trainer, TrainingArguments

    class Given(Trainer):
        def get_train_dataloader(self):
            return DataLoader(batches, batch_size=None)

    given = values["train"]
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=given["batch_size"],
        gradient_accumulation_steps=given["accumulation"],
        learning_rate=given["learning_rate"],
        lr_scheduler_type=given["schedule"],
        weight_decay=0.0,
        max_grad_norm=given["max_grad_norm"],
        use_cpu=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        optim=given.get("optimizer", "adamw_torch"),
        ddp_backend="gloo",
    )
    model = automatic(values).from_pretrained(source)
    trainer = Given(model, arguments, compute_loss_func=mean_over_tokens if own_loss else None)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean_loss(model, batches, causal):
    """Of all tokens that ``batches`` predict, each batch once."""
    total = count = 0
    for batch in {batch["input_ids"].numpy().tobytes(): batch for batch in batches}.values():
        labels = batch["labels"][:, 1:] if causal else batch["labels"]
        logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, : labels.shape[1]]
        total += cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["causal", "bert", "modernbert"])
def test_as_the_trainer(kind, ranks, accumulation, packing, sources, tokenizer_path, tmp_path):
    text = tmp_path / "text.lines"
    documents = [(TEXT[n % 40 :] + TEXT)[:length] for n, length in enumerate(LENGTHS)]
    text.write_text("".join(document + "\n" for document in documents))
    data = {"source": str(text), "tokenizer": str(tokenizer_path), "sequence_length": 32, "held_out": 0.1}
    values = {
        "model": {"source": str(sources[kind])},
        "task": data | {"packing": packing, "name": CAUSAL if kind == "causal" else MASKED},
        "engine": {"name": "deepspeed", "zero_stage": 2} if ranks == 2 else {"name": "fsdp2"},
        "train": {"steps": STEPS, "batch_size": 2, "accumulation": accumulation, "learning_rate": 1e-3}
        | {"schedule": "constant", "max_grad_norm": 0.5},
        "output": {"directory": str(tmp_path / "out")},
    }
    found = run_ranks(ours, ranks, values, timeout=200)
    predicted = {int((batch["labels"] != -100).sum()) for batches, *_ in found for batch in batches}
    assert len(predicted) > 1 or (packing and kind == "causal")
    beside = (values, str(tmp_path / "theirs"), kind == "bert")
    given = [(str(sources[kind]), batches, *beside) for batches, *_ in found]
    losses, weights = run_ranks(on_own, ranks, given, timeout=200)[0]
    assert found[0][1] == pytest.approx(losses, rel=EXACT)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved
    for name, tensor in saved.items():
        wrong = torch.linalg.vector_norm(tensor - weights[name])
        assert wrong <= EXACT * max(1.0, torch.linalg.vector_norm(weights[name])), name
    assert not math.isclose(losses[0], losses[-1], rel_tol=1e-3)
    causal, held = kind == "causal", [batch for _, _, batches, _ in found for batch in batches]
    model = automatic(values).from_pretrained(sources[kind]).eval()
    with torch.no_grad():
        before = mean_loss(model, held, causal)
        model.load_state_dict(weights)
        after = mean_loss(model, held, causal)
    assert found[0][3] == pytest.approx({0: before, STEPS: after}, rel=EXACT)


def on_own(given):
    """``theirs`` on the arguments of this rank."""
    return theirs(*given[torch.distributed.get_rank()])
