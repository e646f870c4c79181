"""Whole runs on tiny models: equal training on every engine and world size."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.training.language import CAUSAL
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config


@pytest.fixture
def make_config(tmp_path, tokenizer_path):
    """Factory of configurations of a short causal run from a checkpoint."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the cat. " * 40)

    def make(source, engine="fsdp2", output="out", **train):
        return {
            "model": {"source": str(source)},
            "task": {
                "name": CAUSAL,
                "source": str(text),
                "tokenizer": str(tokenizer_path),
                "sequence_length": 16,
                "held_out": 0.1,
            },
            "engine": {"name": engine},
            "train": {"steps": 6, "batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 1, **train},
            "output": {"directory": str(tmp_path / output)},
        }

    return make


def run(config):
    from zerostart.training.loop.runner import train

    return train(parse_config(config))


def read_metrics(result):
    lines = Path(result.directory, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_losses(result):
    return [entry["loss"] for entry in read_metrics(result) if "loss" in entry]


@pytest.mark.parametrize(
    "cases",
    [
        (("deepspeed", 3, 2), ("fsdp2", 3, 1)),
        pytest.param(
            (("deepspeed", 2, 2), *(("fsdp2", stage, 2) for stage in (0, 1, 2))), marks=pytest.mark.slow
        ),
    ],
    ids=["engines", "stages"],
)
def test_engines_and_world_sizes_train_alike(cases, checkpoints, make_config):
    """Clipping, decay, accumulation and schedule agree; a step has 8 sequences."""
    path = checkpoints("qwen3_moe_aligned")
    runs = {}
    for case in (("fsdp2", 3, 2), *cases):
        engine, stage, ranks = case
        sizes = {"batch_size": 2, "accumulation": 2} if ranks == 2 else {"batch_size": 8}
        output = f"{engine}-{stage}-{ranks}"
        config = make_config(path, engine, output, weight_decay=0.1, max_grad_norm=0.5, **sizes)
        config["engine"]["zero_stage"] = stage
        runs[case] = run_ranks(run, ranks, config)
    reference, *compared = [read_losses(results[0]) for results in runs.values()]
    assert len(reference) == 6
    assert reference[-1] < reference[0] - 0.3
    for other in compared:
        assert other == pytest.approx(reference, rel=2e-4), runs.keys()
    held_out = [results[0].held_out for results in runs.values()]
    assert held_out[0].keys() == {0, 6}
    for evaluation in held_out[1:]:
        assert evaluation == pytest.approx(held_out[0], rel=2e-4)
    for results in runs.values():
        assert all(result == results[0] for result in results)


def count_ddp_modules(config):
    """Return how many DDP modules are alive when the process group is destroyed."""
    import gc

    from torch.nn.parallel import DistributedDataParallel

    counts = []
    destroy = torch.distributed.destroy_process_group

    def count_and_destroy(*arguments):
        counts.append(sum(type(item) is DistributedDataParallel for item in gc.get_objects()))
        destroy(*arguments)

    torch.distributed.destroy_process_group = count_and_destroy
    run(config)
    return counts


@pytest.mark.slow
def test_ddp_is_freed_before_the_process_group(checkpoints, make_config):
    """A DDP reducer freed last joins gloo's threads under the GIL: a deadlock."""
    config = make_config(checkpoints("qwen3"))
    config["engine"] |= {"zero_stage": 0}
    assert run_ranks(count_ddp_modules, 2, config) == [[0], [0]]


def run_and_stop_rank_one(config):
    from zerostart.training.loop.progress import Display

    show = Display.step

    def step(self, number, figures):
        show(self, number, figures)
        if number == 2 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Display.step = step
    return run(config)


@pytest.mark.slow
def test_sigterm_on_one_rank_stops_all_ranks(checkpoints, make_config):
    results = run_ranks(run_and_stop_rank_one, 2, make_config(checkpoints("qwen3"), steps=50))
    assert results[0] == results[1]
    assert results[0].stopped
    assert results[0].steps == 3
    assert Path(results[0].directory, "model.safetensors").exists()


def run_failing(config, chosen):
    """Run cases in which one rank fails; return the error that this rank raised."""
    from tests.training.language import CausalLanguage
    from zerostart.training.loop import session
    from zerostart.training.loop.progress import Display

    rank, errors = torch.distributed.get_rank(), {}

    def fail_in(owner, name, on, at, error):
        """Make ``owner.name`` raise at its ``at``-th call on rank ``on``."""
        original, calls = getattr(owner, name), []

        def call(*arguments, **options):
            calls.append(name)
            if rank == on and len(calls) == at:
                raise error
            return original(*arguments, **options)

        setattr(owner, name, call)
        return lambda: setattr(owner, name, original)

    from torch.optim import AdamW

    full = Path(config["output"]["directory"])
    cases = {
        "metrics": list,
        "schedule": lambda: fail_in(session, "learning_rate_schedule", 0, 1, KeyError("warmup")),
        "optimizer": lambda: fail_in(session, "_parameter_groups", 1, 1, KeyError("parameters")),
        "batch": lambda: fail_in(CausalLanguage, "drawn", 1, 2, MemoryError("for a batch")),
        "step": lambda: fail_in(AdamW, "step", 1, 2, MemoryError("for the optimizer")),
        "held out": lambda: fail_in(Display, "evaluation", 1, 2, BrokenPipeError("no terminal")),
        "interrupt": lambda: fail_in(Display, "step", 0, 2, KeyboardInterrupt("twice")),
    }
    for case in chosen:
        config["output"] = {"directory": f"{full}-{case}", "overwrite": True}
        if case == "metrics" and rank == 0:
            Path(f"{full}-{case}").mkdir()
            Path(f"{full}-{case}", "metrics.jsonl").symlink_to("/dev/full")
        restore = cases[case]()
        try:
            run(config)
            errors[case] = "nothing"
        except (Exception, KeyboardInterrupt) as error:
            errors[case] = f"{type(error).__name__}: {error}"
        if callable(restore):
            restore()
        errors[case] += f" / {Path(f'{full}-{case}', 'model.safetensors').exists()}"
        torch.distributed.barrier()
    return errors


FAILING = {
    "metrics": r"WriteError: rank 0: .*-metrics/metrics\.jsonl: .* cannot be written: No space left",
    "step": "ZerostartError: rank 1: MemoryError: for the optimizer",
    "schedule": "ZerostartError: rank 0: KeyError: 'warmup'",
    "optimizer": "ZerostartError: rank 1: KeyError: 'parameters'",
    "batch": "ZerostartError: rank 1: MemoryError: for a batch",
    "held out": "ZerostartError: rank 1: BrokenPipeError: no terminal",
    "interrupt": "PeerError: rank 0: stopped by KeyboardInterrupt: twice",
}


@pytest.mark.parametrize(
    "chosen", [["metrics", "step"], pytest.param([*FAILING][2:], marks=pytest.mark.slow)], ids=["two", "more"]
)
def test_failure_of_one_rank_is_raised_on_all(checkpoints, make_config, chosen):
    """Failures before the loop, for a batch, in and after a step save nothing."""
    config = make_config(checkpoints("qwen3"), steps=2)
    first, second = run_ranks(run_failing, 2, config, chosen)
    if "interrupt" in first:  # its own rank raises the original error
        assert first.pop("interrupt") == "KeyboardInterrupt: twice / False"
        assert re.match(f"{FAILING['interrupt']}.* / False", second.pop("interrupt"))
    assert first == second
    for case, message in first.items():
        assert re.match(f"{FAILING[case]}.* / False", message), (case, message)


def test_mistakes_end_the_run_before_the_load(checkpoints, make_config):
    source = checkpoints("qwen3")
    config = make_config(source)
    Path(config["output"]["directory"]).mkdir()
    Path(config["output"]["directory"], "something").touch()
    with pytest.raises(ConfigError, match="not empty"):
        run(config)
    config = make_config(source, output="other")
    with pytest.raises(ConfigError, match=r"tracking\.trackers: nonsense is unknown; known are .*wandb"):
        run({**config, "tracking": {"trackers": ["nonsense"]}})


def run_and_read_weights(config):
    """Run, and return the optimizer's weights instead of saving."""
    from zerostart.training.loop import runner

    weights = {}

    def read_weights(self, *_):
        model = self._model
        if config["engine"]["name"] == "deepspeed":
            from deepspeed.utils import safe_get_full_fp32_param

            module = getattr(model, "module", model)
            weights.update({n: safe_get_full_fp32_param(p).clone() for n, p in module.named_parameters()})
        else:
            weights.update(zerostart.full_tensors(model, rank=None))

    runner.Exporter.save_final = read_weights
    run(config)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_mixed_precision_starts_from_the_stored_values(engine, checkpoints, make_config):
    from transformers import AutoModelForCausalLM

    path = checkpoints("qwen3_moe_aligned")
    stored = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    options = {"steps": 1, "learning_rate": 1e-30, "mixed_precision": "bf16"}
    config = make_config(path, engine, **options)
    for fp32_masters in (True, False):
        if engine == "fsdp2":  # Its default is float32.
            config["model"] |= {"dtype": "bfloat16"}
        config["model"] |= {"fp32_masters": fp32_masters}
        config["output"] = {"directory": config["output"]["directory"] + "x"}
        for weights in run_ranks(run_and_read_weights, 2, config):
            for name, tensor in stored.items():
                expected = tensor if fp32_masters else tensor.bfloat16().float()
                assert torch.equal(weights[name].float(), expected), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("checkpointing", [True, "offload"])
def test_checkpointed_blocks_train_alike(engine, checkpointing, checkpoints, make_config):
    path = checkpoints("qwen3")
    plain = run_ranks(run, 2, make_config(path, engine, output="plain"))
    checkpointed = run_ranks(
        run, 2, make_config(path, engine, output="again", checkpoint_blocks=checkpointing)
    )
    assert read_losses(checkpointed[0]) == read_losses(plain[0])
    assert checkpointed[0].held_out == plain[0].held_out
