"""Whole runs on tiny models: the same training on every engine and world size, and what is saved."""

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
def values(tmp_path, tokenizer_path):
    """Builds the configuration of a short causal run of the checkpoint at a path."""
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


def run(values):
    from zerostart.training.loop.runner import train

    return train(parse_config(values))


def metrics(result):
    lines = Path(result.directory, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(result):
    return [entry["loss"] for entry in metrics(result) if "loss" in entry]


@pytest.mark.parametrize(
    "others",
    [
        (("deepspeed", 3, 2), ("fsdp2", 3, 1)),
        pytest.param(
            (("deepspeed", 2, 2), *(("fsdp2", stage, 2) for stage in (0, 1, 2))), marks=pytest.mark.slow
        ),
    ],
    ids=["engines", "stages"],
)
def test_engines_and_world_sizes_train_alike(others, checkpoints, values):
    """Clipping, decay, accumulation and schedule mean the same everywhere; the batch of a step is 8."""
    path = checkpoints("qwen3_moe_aligned")
    runs = {}
    for case in (("fsdp2", 3, 2), *others):
        engine, stage, ranks = case
        sizes = {"batch_size": 2, "accumulation": 2} if ranks == 2 else {"batch_size": 8}
        output = f"{engine}-{stage}-{ranks}"
        given = values(path, engine, output, weight_decay=0.1, max_grad_norm=0.5, **sizes)
        given["engine"]["zero_stage"] = stage
        runs[case] = run_ranks(run, ranks, given)
    reference, *rest = [losses(results[0]) for results in runs.values()]
    assert len(reference) == 6
    assert reference[-1] < reference[0] - 0.3
    for other in rest:
        assert other == pytest.approx(reference, rel=2e-4), runs.keys()
    held_out = [results[0].held_out for results in runs.values()]
    assert held_out[0].keys() == {0, 6}
    for one in held_out[1:]:
        assert one == pytest.approx(held_out[0], rel=2e-4)
    for results in runs.values():
        assert all(result == results[0] for result in results)


def wrappers_at_the_end(values):
    """How many DDP modules are alive when the process group is destroyed."""
    import gc

    from torch.nn.parallel import DistributedDataParallel

    alive = []
    destroy = torch.distributed.destroy_process_group

    def counting(*arguments):
        alive.append(sum(type(one) is DistributedDataParallel for one in gc.get_objects()))
        destroy(*arguments)

    torch.distributed.destroy_process_group = counting
    run(values)
    return alive


@pytest.mark.slow
def test_reducer_goes_before_the_process_group(checkpoints, values):
    """A reducer that holds the group last joins gloo's threads under the GIL, which they may wait for."""
    given = values(checkpoints("qwen3"))
    given["engine"] |= {"zero_stage": 0}
    assert run_ranks(wrappers_at_the_end, 2, given) == [[0], [0]]


def run_until_rank_one_is_asked_to_stop(values):
    from zerostart.training.loop.progress import Display

    show = Display.step

    def step(self, number, figures):
        show(self, number, figures)
        if number == 2 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Display.step = step
    return run(values)


@pytest.mark.slow
def test_a_wish_to_stop_on_one_rank_stops_all_after_a_step(checkpoints, values):
    results = run_ranks(run_until_rank_one_is_asked_to_stop, 2, values(checkpoints("qwen3"), steps=50))
    assert results[0] == results[1]
    assert results[0].stopped
    assert results[0].steps == 3
    assert Path(results[0].directory, "model.safetensors").exists()


def run_failing(values, chosen):
    """Runs that one rank cannot go on with, each for another reason; what every rank was told."""
    from tests.training.language import CausalLanguage
    from zerostart.training.loop import session
    from zerostart.training.loop.progress import Display

    rank, told = torch.distributed.get_rank(), {}

    def fails(owner, name, on, at, error):
        """``owner.name`` raises on one rank when it is called for the ``at``-th time."""
        kept, calls = getattr(owner, name), []

        def call(*arguments, **options):
            calls.append(name)
            if rank == on and len(calls) == at:
                raise error
            return kept(*arguments, **options)

        setattr(owner, name, call)
        return lambda: setattr(owner, name, kept)

    from torch.optim import AdamW

    full = Path(values["output"]["directory"])
    cases = {
        "metrics": list,
        "schedule": lambda: fails(session, "learning_rate_schedule", 0, 1, KeyError("warmup")),
        "optimizer": lambda: fails(session, "_parameter_groups", 1, 1, KeyError("parameters")),
        "batch": lambda: fails(CausalLanguage, "drawn", 1, 2, MemoryError("for a batch")),
        "step": lambda: fails(AdamW, "step", 1, 2, MemoryError("for the optimizer")),
        "held out": lambda: fails(Display, "evaluation", 1, 2, BrokenPipeError("no terminal")),
        "interrupt": lambda: fails(Display, "step", 0, 2, KeyboardInterrupt("twice")),
    }
    for case in chosen:
        values["output"] = {"directory": f"{full}-{case}", "overwrite": True}
        if case == "metrics" and rank == 0:
            Path(f"{full}-{case}").mkdir()
            Path(f"{full}-{case}", "metrics.jsonl").symlink_to("/dev/full")
        mend = cases[case]()
        try:
            run(values)
            told[case] = "nothing"
        except (Exception, KeyboardInterrupt) as error:
            told[case] = f"{type(error).__name__}: {error}"
        if callable(mend):
            mend()
        told[case] += f" / {Path(f'{full}-{case}', 'model.safetensors').exists()}"
        torch.distributed.barrier()
    return told


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
def test_what_one_rank_fails_with_is_raised_on_all(checkpoints, values, chosen):
    """Wherever it fails by itself: before the loop, for a batch, in a step, after one; nothing is saved."""
    given = values(checkpoints("qwen3"), steps=2)
    first, second = run_ranks(run_failing, 2, given, chosen)
    if "interrupt" in first:  # is what it is on its own rank
        assert first.pop("interrupt") == "KeyboardInterrupt: twice / False"
        assert re.match(f"{FAILING['interrupt']}.* / False", second.pop("interrupt"))
    assert first == second
    for case, message in first.items():
        assert re.match(f"{FAILING[case]}.* / False", message), (case, message)


def test_mistakes_end_the_run_before_the_load(checkpoints, values):
    source = checkpoints("qwen3")
    given = values(source)
    Path(given["output"]["directory"]).mkdir()
    Path(given["output"]["directory"], "something").touch()
    with pytest.raises(ConfigError, match="not empty"):
        run(given)
    given = values(source, output="other")
    with pytest.raises(ConfigError, match=r"tracking\.trackers: nonsense is unknown; known are .*wandb"):
        run({**given, "tracking": {"trackers": ["nonsense"]}})


def run_and_look(values):
    """A run whose step is too small to be seen; the weights that the optimizer holds, in place of saving."""
    from zerostart.training.loop import runner

    seen = {}

    def look(self, *_):
        model = self._model
        if values["engine"]["name"] == "deepspeed":
            from deepspeed.utils import safe_get_full_fp32_param

            module = getattr(model, "module", model)
            seen.update({n: safe_get_full_fp32_param(p).clone() for n, p in module.named_parameters()})
        else:
            seen.update(zerostart.full_tensors(model, rank=None))

    runner.Exporter.save_final = look
    run(values)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_mixed_precision_starts_from_the_stored_values(engine, checkpoints, values):
    from transformers import AutoModelForCausalLM

    path = checkpoints("qwen3_moe_aligned")
    stored = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    options = {"steps": 1, "learning_rate": 1e-30, "mixed_precision": "bf16"}
    given = values(path, engine, **options)
    for fp32_masters in (True, False):
        if engine == "fsdp2":  # Its own default is float32 anyway.
            given["model"] |= {"dtype": "bfloat16"}
        given["model"] |= {"fp32_masters": fp32_masters}
        given["output"] = {"directory": given["output"]["directory"] + "x"}
        for seen in run_ranks(run_and_look, 2, given):
            for name, tensor in stored.items():
                expected = tensor if fp32_masters else tensor.bfloat16().float()
                assert torch.equal(seen[name].float(), expected), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("checkpointing", [True, "offload"])
def test_checkpointed_blocks_train_alike(engine, checkpointing, checkpoints, values):
    path = checkpoints("qwen3")
    plain = run_ranks(run, 2, values(path, engine, output="plain"))
    made = run_ranks(run, 2, values(path, engine, output="again", checkpoint_blocks=checkpointing))
    assert losses(made[0]) == losses(plain[0])
    assert made[0].held_out == plain[0].held_out
