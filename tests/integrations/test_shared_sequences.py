"""Scripts whose ranks share sequences, by accelerate's ``ParallelismConfig``, with one added line."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import zerostart
from tests.integrations.scripts import fsdp2, sequences, trainer_script, zero3
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.live.model import record_of

MODEL = "qwen3_even"


def run(path: Path, out: Path, environment: dict[str, str], adopt: Any, world: int = 2, **more: Any) -> Any:
    found = run_ranks(
        trainer_script, world, path, out, environment, more, adopt, {}, process_group=False, timeout=200
    )
    assert all(one["losses"] == found[0]["losses"] for one in found)
    return found[0]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_trainer_on_deepspeed(stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    environment = {**zero3(tmp_path, zero_optimization=zero), **sequences("SP")}
    # One row: on the CPU DeepSpeed's own cutting of more leaves labels that transformers cannot look at.
    stock = run(checkpoints(MODEL), tmp_path / "stock", environment, None, batch_size=1)
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, batch_size=1)
    assert ours["losses"] == stock["losses"]
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6)


@pytest.mark.slow
def test_trainer_on_fsdp2(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """accelerate's own cannot be compared: torch has no context parallelism on the CPU by itself."""
    environment = {**fsdp2(), **sequences("CP")}
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, use_cpu=True)
    alone = run(checkpoints(MODEL), tmp_path / "alone", {}, None, 1, use_cpu=True)
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)


def refusals(path: Path, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """What a script is told whose settings contradict each other, and how it is loaded where they do not."""
    os.environ.update(environment)
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig, InitProcessGroupKwargs
    from transformers import AutoModel, AutoModelForCausalLM, TrainingArguments

    from zerostart.integrations.engine_setup import check_sharing

    def shared(**handler: Any) -> ParallelismConfig:
        return ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(**handler))

    def loaded(parallelism: ParallelismConfig, **loading: Any) -> Any:
        settings = {"ddp_backend": "gloo", "report_to": [], "parallelism_config": parallelism}
        arguments = TrainingArguments(output_dir=str(folder), **settings)
        assert arguments is not None
        return AutoModelForCausalLM.from_pretrained(path, **loading)

    told = {}

    def note(name: str, call: Any) -> None:
        with pytest.raises(zerostart.errors.ConfigError) as caught:
            call()
        told[name] = str(caught.value)

    with zerostart.enabled():
        note("unnamed", lambda: loaded(shared()))
        uneven = {"sp_seq_length": 5, "sp_seq_length_is_variable": False, "sp_attn_implementation": "sdpa"}
        note("uneven", lambda: loaded(shared(**uneven)))
        other = shared(sp_attn_implementation="flash_attention_2")
        note("other attention", lambda: loaded(other))
        with zerostart.enabled(sequence_parallel=4):
            note("twice", lambda: loaded(shared(sp_attn_implementation="sdpa")))
        model = loaded(shared(sp_attn_implementation="sdpa"))
        told["loaded"] = str(record_of(model).engine.mesh)
        beside = shared(sp_attn_implementation="sdpa")
        arguments = TrainingArguments(output_dir=str(folder), ddp_backend="gloo", parallelism_config=beside)
        encoder = AutoModel.from_pretrained(folder / "encoder")
        told["beside"] = str(record_of(encoder).engine.mesh)
        note("encoder prepared", lambda: check_sharing(encoder))
        del arguments
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        optimizer = torch.optim.AdamW(model.parameters())
        note("prepared", lambda: accelerator.prepare(model, optimizer))
    return told


@pytest.mark.slow
def test_what_contradicts_itself_is_told(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    environment = zero3(tmp_path, train_micro_batch_size_per_gpu=1)
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=11, **sizes)).save_pretrained(tmp_path / "encoder")
    arguments = (checkpoints(MODEL), tmp_path, environment)
    first, second = run_ranks(refusals, 2, *arguments, process_group=False, timeout=200)
    assert first == second
    assert "has no attention implementation; pass sp_handler" in first["unnamed"]
    assert "does not divide sp_seq_length=5" in first["uneven"]
    assert "sp_attn_implementation='flash_attention_2', but Qwen3ForCausalLM has" in first["other attention"]
    assert "sequence_parallel=4 was passed, but accelerate's" in first["twice"]
    assert "sequence_parallel=2" in first["loaded"]
    assert "sequence_parallel=1" in first["beside"]
    assert "BertModel has attention that looks ahead, so no ranks can share" in first["encoder prepared"]
    assert "was loaded with sequence_parallel=2, but accelerate has 1 ranks share" in first["prepared"]
