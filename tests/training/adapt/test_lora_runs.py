"""Runs with LoRA and averaged weights equal PEFT, torch and diffusers' EMAModel."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.ranks import rank_outcomes, run_ranks
from tests.training.language import CAUSAL, CausalLanguage
from tests.training.loop.test_run import read_losses, run
from zerostart.errors import ConfigError
from zerostart.state.converting.convert import convert

TARGETS = ["q_proj", "v_proj", "down_proj"]
RATE, STEPS, SEED = 1e-2, 4, 42
AVERAGED = {"decay": 0.9, "warmup": True, "power": 0.7, "evaluate": True}
#: Sentences of one length: the mean over examples equals that over tokens.
SENTENCES = tuple(
    sentence.ljust(32, ".")
    for sentence in (
        "the cat sat on the mat",
        "the dog sat on the cat, and sat",
        "a mat, a cat.",
        "and the mat sat on the dog",
        "the dog sat on a mat",
        "cat and dog",
    )
)


@pytest.fixture
def make_config(tmp_path, tokenizer_path):
    """Factory of run configurations: a step has all four examples; two are held out."""
    text = tmp_path / "text.lines"
    text.write_text("".join(sentence + "\n" for sentence in SENTENCES))

    def make(source, engine, folder, ranks=2, **sections):
        train = {
            "steps": STEPS,
            "batch_size": 4 // ranks,
            "learning_rate": RATE,
            "schedule": "constant",
            "seed": SEED,
            **sections.pop("train", {}),
        }
        return {
            "model": {"source": str(source)},
            "task": {
                "name": CAUSAL,
                "source": str(text),
                "tokenizer": str(tokenizer_path),
                "sequence_length": 32,
                "packing": False,
                "held_out": 0.34,
            },
            "engine": engine,
            "train": train,
            "output": {"directory": str(tmp_path / folder), **sections.pop("output", {})},
            **sections,
        }

    return make


def load_batches(config):
    """Return the padded batches that are trained on and held out."""
    from zerostart.training.config.load import parse_config

    task = CausalLanguage(parse_config(config))
    task.open()
    items = task.items(None)
    ids = [items[number]["input_ids"] for number in range(len(items))]
    assert len(ids) == len(SENTENCES)
    return pad(ids[:4]), pad(ids[4:])


def pad(ids):
    length = max(map(len, ids))
    rows = [torch.nn.functional.pad(row, (0, length - len(row))) for row in ids]
    mask = torch.stack([(torch.arange(length) < len(row)).long() for row in ids])
    inputs = torch.stack(rows)
    return {"input_ids": inputs, "attention_mask": mask, "labels": inputs.masked_fill(mask == 0, -100)}


def train_with_peft(path, config, rank=3, alpha=6):
    """Train by PEFT; return losses, adapters, averaged adapters, their held-out loss, and the model."""
    from diffusers.training_utils import EMAModel
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    training, held_out = load_batches(config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(SEED)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS))
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    rules = {key: AVERAGED[key] for key in ("decay", "power")}
    ema = EMAModel(parameters, use_ema_warmup=True, **rules)
    losses = []
    for _ in range(config["train"]["steps"]):
        loss = adapted(**training, use_cache=False).loss
        losses.append(float(loss))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(parameters)
    trained = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(adapted).items()}
    ema.copy_to(parameters)
    with torch.no_grad():
        after = float(adapted(**held_out, use_cache=False).loss)
    return losses, trained, get_peft_model_state_dict(adapted), after, adapted


def assert_near(path, expected, tolerance=2e-5):
    tensors = load_file(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=name)


def count_data_bytes(path):
    """Return the bytes of tensor data in a safetensors file."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - length


LORA = {"rank": 3, "alpha": 6, "targets": TARGETS}
ENGINES = [{"name": "deepspeed"}, {"name": "fsdp2"}]


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_lora_equals_peft(engine, checkpoints, make_config):
    """Averaged weights and held-out loss are equal too; the file has only trained tensors."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = checkpoints("qwen3")
    config = make_config(path, {"name": engine}, "out", lora=LORA, ema=AVERAGED)
    results = run_ranks(run, 2, config)
    expected, trained, averaged, after, reference = train_with_peft(path, config)
    assert read_losses(results[0]) == pytest.approx(expected, rel=1e-5)
    out = Path(results[0].directory)
    assert_near(out / "adapter_model.safetensors", trained)
    assert_near(out / "ema" / "adapter_model.safetensors", averaged)
    assert results[0].held_out[STEPS] == pytest.approx(after, rel=1e-5)
    assert count_data_bytes(out / "adapter_model.safetensors") == 4 * sum(t.numel() for t in trained.values())
    assert not list(out.glob("model*.safetensors"))
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), out / "ema")
    _, held_out = load_batches(config)
    with torch.no_grad():
        logits = reloaded(**held_out).logits
        torch.testing.assert_close(logits, reference(**held_out).logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("engine", "stage"), [("deepspeed", s) for s in range(4)] + [("fsdp2", s) for s in range(4)]
)
def test_lora_equals_peft_on_every_engine(engine, stage, checkpointing, checkpoints, make_config):
    path = checkpoints("qwen3")
    engine_config = {"name": engine, "zero_stage": stage}
    extra = {"train": {"checkpoint_blocks": checkpointing}}
    config = make_config(path, engine_config, "out", lora=LORA, ema={**AVERAGED, "place": "host"}, **extra)
    results = run_ranks(run, 2, config)
    expected, trained, averaged, after, _ = train_with_peft(path, config)
    assert read_losses(results[0]) == pytest.approx(expected, rel=1e-5)
    out = Path(results[0].directory)
    assert_near(out / "adapter_model.safetensors", trained)
    assert_near(out / "ema" / "adapter_model.safetensors", averaged)
    for folder in (out, out / "ema"):
        assert count_data_bytes(folder / "adapter_model.safetensors") == 4 * sum(
            t.numel() for t in trained.values()
        )
    assert results[0].held_out[STEPS] == pytest.approx(after, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_merged_exports_every_two_steps(engine, checkpoints, make_config):
    """Exports equal PEFT's ``merge_and_unload`` after as many steps."""
    from transformers import AutoModelForCausalLM

    path = checkpoints("qwen3")
    config = make_config(path, {"name": engine}, "out", lora=LORA, output={"merge": True, "every": 2})
    out = Path(run_ranks(run, 2, config)[0].directory)
    short = {**config, "train": {**config["train"], "steps": 2}}
    for folder, run_of in ((out, config), (out / "exports" / "step-2", short)):
        merged = train_without_average(path, run_of).merge_and_unload()
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, merged.state_dict()[name], rtol=0, atol=1e-4, msg=name)
    assert sorted(p.name for p in (out / "exports").iterdir()) == ["step-2", "step-4"]


def train_without_average(path, config):
    from peft import set_peft_model_state_dict

    _, trained, _, _, adapted = train_with_peft(path, config)
    set_peft_model_state_dict(adapted, trained)
    return adapted


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [{"name": "deepspeed"}, {"name": "fsdp2"}, {"name": "deepspeed", "zero_stage": 2}]
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_lora_resumes_on_other_ranks(engine, ranks, checkpoints, make_config):
    """The checkpoint has adapters and averages, and no base weights."""
    path = checkpoints("qwen3")
    sections = {"lora": LORA, "ema": AVERAGED, "checkpoint": {"every": 2, "keep": 9}}
    straight = run_ranks(run, 2, make_config(path, engine, "straight", **sections))[0]
    first = Path(straight.directory, "checkpoints", "step-00000002")
    assert all(
        "lora_" in name for file in (first / "model").glob("*.safetensors") for name in load_file(file)
    )
    with pytest.raises(ConfigError, match="holds only the trained tensors"):
        convert(first, Path(straight.directory, "exported"))
    config = make_config(path, engine, "resumed", ranks, **sections, resume=str(first))
    resumed = run_ranks(run, ranks, config)[0]
    assert read_losses(resumed) == pytest.approx(read_losses(straight)[2:], rel=1e-5)
    for folder in (".", "ema"):
        expected = load_file(Path(straight.directory, folder, "adapter_model.safetensors"))
        assert_near(Path(resumed.directory, folder, "adapter_model.safetensors"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [{"name": "deepspeed"}, {"name": "fsdp2"}, {"name": "deepspeed", "zero_stage": 1}]
)
def test_resuming_on_the_same_ranks_is_exact(engine, checkpoints, make_config):
    path = checkpoints("qwen3")
    sections = {"ema": AVERAGED, "checkpoint": {"every": 2, "keep": 9}}
    straight = run_ranks(run, 2, make_config(path, engine, "straight", **sections))[0]
    first = Path(straight.directory, "checkpoints", "step-00000002")
    resumed = run_ranks(run, 2, make_config(path, engine, "resumed", **sections, resume=str(first)))[0]
    assert read_losses(resumed) == read_losses(straight)[2:]
    assert resumed.held_out[STEPS] == straight.held_out[STEPS]
    for folder in (".", "ema"):
        expected = load_file(Path(straight.directory, folder, "model.safetensors"))
        assert_near(Path(resumed.directory, folder, "model.safetensors"), expected, 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["peft", "diffusers"])
def test_run_starts_from_a_lora_file(form, checkpoints, make_config):
    """The model equals the saved one for each format, also with another alpha."""
    path = checkpoints("qwen3")
    first = make_config(path, {"name": "fsdp2"}, "first", lora=LORA, output={"format": form})
    result = run_ranks(run, 2, first)[0]
    after = result.held_out[STEPS]
    second = {**LORA, "alpha": 12, "start_from": result.directory}
    continued = make_config(path, {"name": "deepspeed"}, "second", lora=second)
    assert run_ranks(run, 2, continued)[0].held_out[0] == pytest.approx(after, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16"])
def test_lora_in_mixed_precision_learns(precision, checkpoints, make_config):
    for engine in ("deepspeed", "fsdp2"):
        config = make_config(
            checkpoints("qwen3"),
            {"name": engine},
            f"out-{engine}",
            lora=LORA,
            ema={"decay": 0.5},
            train={"mixed_precision": precision},
        )
        result = run_ranks(run, 2, config)[0]
        assert read_losses(result)[-1] < read_losses(result)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "stage"), [("deepspeed", 3), ("deepspeed", 2), ("deepspeed", 1), ("fsdp2", 3), ("fsdp2", 0)]
)
def test_part_of_a_model_is_trained(engine, stage, checkpoints, make_config):
    """Training equals torch with other parameters frozen; the file has only trained tensors."""
    from transformers import AutoModelForCausalLM

    path = checkpoints("qwen3")
    config = make_config(
        path,
        {"name": engine, "zero_stage": stage},
        "out",
        train={"trainable": ["model.layers.*.mlp", "model.norm"]},
        output={"trainable_only": True, "remove_prefix": "model."},
    )
    result = run_ranks(run, 2, config)[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name or name == "model.norm.weight")
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
    training, _ = load_batches(config)
    expected = []
    for _ in range(STEPS):
        loss = model(**training, use_cache=False).loss
        expected.append(float(loss))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert read_losses(result) == pytest.approx(expected, rel=1e-5)
    stripped = {name.removeprefix("model."): p.detach() for name, p in trained.items()}
    assert_near(Path(result.directory, "model.safetensors"), stripped)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"name": "fsdp2"}, {"name": "deepspeed", "zero_stage": 2}])
def test_tracker_that_cannot_start_fails_on_all_ranks(engine, checkpoints, make_config):
    """Only one rank starts it."""
    pytest.importorskip("tensorboard")
    tracking = {"trackers": ["tensorboard"], "project": "../file/mine"}
    config = make_config(checkpoints("qwen3"), engine, "out", tracking=tracking)
    Path(config["output"]["directory"]).with_name("file").touch()
    outcomes = rank_outcomes(run, 2, config, timeout=200)
    assert "tracking.trackers: tensorboard cannot start for tracking.project" in outcomes[0].message
    assert "NotADirectoryError" in outcomes[0].message
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.ConfigError"}
    assert outcomes[0].message == outcomes[1].message


@pytest.mark.slow
def test_diffusers_file_has_the_lora_configuration(checkpoints, make_config):
    config = make_config(
        checkpoints("qwen3"), {"name": "fsdp2"}, "out", lora=LORA, output={"format": "diffusers"}
    )
    out = Path(run_ranks(run, 2, config)[0].directory, "pytorch_lora_weights.safetensors")
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"] == 6
        assert all(name.startswith("transformer.model.layers.") for name in file.keys())  # noqa: SIM118
