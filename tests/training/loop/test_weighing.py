"""Loss and gradients of padded batches on several ranks: those of one process that sees the whole batch."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tests.ranks import run_ranks
from tests.training.language import CAUSAL, MASKED
from zerostart.training.config.load import parse_config

#: Lengths of the documents of one step: what two ranks, or two batches, see differs in predicted tokens. One
#: of them predicts nothing: with a batch size of 1 that is a whole batch.
LENGTHS = (30, 1, 5, 17)
TEXT = "the cat sat on the mat, and the dog sat on the cat."
#: What the runner promises, relative to one process, for parameters and gradients in fp32.
EXACT = 1e-6


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A tiny BERT with its head and without dropout; its loss takes no ``num_items_in_batch``."""
    from transformers import BertConfig, BertForMaskedLM

    path = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}
    torch.manual_seed(1)
    config = BertConfig(vocab_size=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    BertForMaskedLM(config).save_pretrained(path)
    return path


@pytest.fixture
def values(tmp_path, tokenizer_path):
    """Builds the configuration of a run over documents of `LENGTHS`, which are one step."""
    text = tmp_path / "text.lines"

    def make(source, task, engine, zero_stage, accumulation, documents=LENGTHS):
        text.write_text("".join(TEXT[:length] + "\n" for length in documents))
        return {
            "model": {"source": str(source)},
            "task": {
                "name": task,
                "source": str(text),
                "tokenizer": str(tokenizer_path),
                "sequence_length": 32,
                "packing": False,
            },
            "engine": {"name": engine, "zero_stage": zero_stage},
            "train": {"steps": 1, "batch_size": 2 // accumulation, "accumulation": accumulation},
            "output": {"directory": str(tmp_path / "out"), "overwrite": True},
        }

    return make


def first_step(values):
    """What one step of the runner shows: batches as collated, its line of metrics, whole gradients."""
    from zerostart.training.loop import runner
    from zerostart.training.loop.session import Session
    from zerostart.training.loop.task import task_class

    batches, gradients = [], {}
    task = task_class(values["task"]["name"])
    collators, clip = task.collator, Session.clip

    def recording(*arguments):
        collate = collators(*arguments)
        return lambda items: batches.append(collate(items)) or batches[-1]

    def look(module):
        for name, parameter in module.named_parameters():
            gradients[name.removeprefix("module.")] = whole_gradient(parameter)

    def looked_at(session, *arguments):
        if not session.engine.owns_optimizer:
            look(session.model)
        return clip(session, *arguments)

    task.collator, Session.clip = recording, looked_at
    runner.export_model = lambda *_: None
    if values["engine"]["name"] == "deepspeed":
        from deepspeed.runtime.engine import DeepSpeedEngine

        step = DeepSpeedEngine.step
        DeepSpeedEngine.step = lambda engine, *a: look(engine.module) or step(engine, *a)
    result = runner.train(parse_config(values))
    (line,) = Path(result.directory, "metrics.jsonl").read_text().splitlines()
    return {
        "batches": batches[: values["train"]["accumulation"]],
        "metrics": json.loads(line, parse_constant=pytest.fail),
        "loss": result.first_loss,
        "gradients": gradients,
    }


def whole_gradient(parameter):
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).clone()
    gradient = parameter.grad
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


def alone(source, task, batches):
    """Loss and gradients of one process on all ``batches`` as one, in double precision, by torch's loss."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    automatic = AutoModelForCausalLM if task == CAUSAL else AutoModelForMaskedLM
    model = automatic.from_pretrained(source).double().eval()
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    rows = {key: [row for batch in batches for row in batch[key]] for key in fill}
    whole = {key: pad_sequence(rows[key], batch_first=True, padding_value=fill[key]) for key in fill}
    labels = whole.pop("labels")
    logits = model(**whole).logits
    if task == CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def check(source, values):
    """That one step on two ranks is that of one process."""
    ranks = run_ranks(first_step, 2, values, timeout=200)
    batches = [batch for rank in ranks for batch in rank["batches"]]
    loss, gradients = alone(source, values["task"]["name"], batches)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    shown = ranks[0]["metrics"]
    assert shown["loss"] == pytest.approx(loss, rel=EXACT)
    assert [rank["loss"] for rank in ranks] == [shown["loss"]] * 2
    if (values["engine"]["name"], values["engine"]["zero_stage"]) != ("deepspeed", 0):  # it does not tell
        assert shown["gradient_norm"] == pytest.approx(norm, rel=EXACT)
    for rank in ranks:
        assert rank["gradients"].keys() == gradients.keys()
        wrong = sum((rank["gradients"][n].double() - gradients[n]).square().sum() for n in gradients)
        assert math.sqrt(wrong) < EXACT * norm


CASES = [
    (e, s, t, a) for e in ("deepspeed", "fsdp2") for s in range(4) for t in (CAUSAL, MASKED) for a in (1, 2)
]
FAST = {
    ("deepspeed", 3, CAUSAL, 2),
    ("deepspeed", 1, MASKED, 1),
    ("fsdp2", 3, MASKED, 2),
    ("fsdp2", 0, CAUSAL, 1),
}


@pytest.mark.parametrize(
    ("engine", "zero_stage", "task", "accumulation"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_a_step_is_that_of_one_process(engine, zero_stage, task, accumulation, checkpoints, masked, values):
    source = checkpoints("qwen3") if task == CAUSAL else masked
    check(source, values(source, task, engine, zero_stage, accumulation))


@pytest.mark.slow
def test_a_step_of_replicas_is_that_of_one_process(checkpoints, values):
    source = checkpoints("qwen3")
    given = values(source, CAUSAL, "fsdp2", 3, 2)
    given["engine"]["config"] = {"replicate": 2}
    check(source, given)


@pytest.mark.slow
def test_a_step_that_predicts_nothing_has_no_loss_and_moves_nothing(checkpoints, values):
    """As JSON the loss is null: NaN, which one process would see, is none, and would spoil the model."""
    source = checkpoints("qwen3")
    given = values(source, CAUSAL, "fsdp2", 3, 1, documents=(1, 1, 1, 1))
    for rank in run_ranks(first_step, 2, given):
        assert rank["loss"] is rank["metrics"]["loss"] is None
        assert rank["metrics"]["gradient_norm"] == 0.0
        assert all(not gradient.any() for gradient in rank["gradients"].values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_an_auxiliary_loss_weighs_as_the_batch_that_it_is_of(engine, checkpoints, values):
    """Each batch balances its own routing; one process that accumulates the same batches gets the same."""
    from transformers import AutoModelForCausalLM

    plain = checkpoints("qwen3_moe_aligned")
    source = checkpoints.root / "balanced"
    model = AutoModelForCausalLM.from_pretrained(plain, output_router_logits=True, router_aux_loss_coef=0.5)
    model.save_pretrained(source)
    given = values(source, CAUSAL, engine, 3, 1)
    ranks = run_ranks(first_step, 2, given)
    batches = [rank["batches"][0] for rank in ranks]
    weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert len(set(weights)) == 2
    loss = 0.0
    for batch, weight in zip(batches, weights, strict=True):
        own = model.train()(**batch, use_cache=False)
        assert own.aux_loss > 0
        loss += own.loss * weight / sum(weights)
    loss.backward()
    assert ranks[0]["metrics"]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        found = ranks[1]["gradients"][name]
        assert torch.allclose(found, parameter.grad, rtol=1e-4, atol=1e-5 * parameter.grad.abs().max()), name
