"""Containers of parameters inside modules keep referring to the trained tensors."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

ENGINES = [("fsdp2", 3), ("fsdp2", 1), ("fsdp2", 0), ("deepspeed", 3), ("deepspeed", 2), ("deepspeed", 1)]


class Layer(nn.Module):
    """Uses its parameters only through containers and views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 5))
        self.bias = nn.Parameter(torch.zeros(7))
        self.register_buffer("table", torch.arange(7.0))
        self.register_buffer("start", self.table[:3], persistent=False)
        self.items = [self.weight, (self.bias, {"table": self.table})]
        self.box = SimpleNamespace(refs=(weakref.ref(self.bias), self.table[3:]))
        self.named = {"weight": self.weight}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.named["weight"]) + self.box.refs[0]() + self.items[0].sum(1)
        return y * self.items[1][1]["table"] + self.start.sum() + self.box.refs[1].sum()


class Model(nn.Module):
    """The layer, recurrent layers, and a list of all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.forwards = nn.LSTM(7, 6, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(12, 3)
        self.everything = [list(self.parameters())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.forwards(self.layer(x))[0])[0].sum(-1)


def wrong_aliases(model: Any) -> list[str]:
    """Return containers without the module's tensor."""
    layer, weights = model.layer, list(model.parameters())
    pairs = [
        (layer.items[0], layer.weight),
        (layer.items[1][0], layer.bias),
        (layer.items[1][1]["table"], layer.table),
        (layer.box.refs[0](), layer.bias),
        (layer.named["weight"], layer.weight),
        *zip(model.everything[0], weights, strict=True),
    ]
    for rnn in (model.forwards, model.gru):
        own = [getattr(rnn, name) for name in rnn._flat_weights_names]
        pairs += [*zip(rnn._flat_weights, own, strict=True)]
    errors = [f"pair {at}" for at, (alias, own_tensor) in enumerate(pairs) if alias is not own_tensor]
    memory = {t.untyped_storage()._cdata for t in (layer.table, layer.start, layer.box.refs[1])}
    return errors + ([] if len(memory) == 1 else ["views"])


def train(state: dict[str, torch.Tensor], engine: str, zero_stage: int, x: torch.Tensor) -> Any:
    """Return wrong aliases, the output, and the gradients."""
    model: Any = zerostart.load(state, Model, engine=engine, zero_stage=zero_stage, progress=False).train()
    errors = wrong_aliases(model)
    if engine == "fsdp2":
        output = model(x)
        errors += wrong_aliases(model)
        output.sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        gradients = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
        torch.optim.SGD(model.parameters(), 0.1).step()
        return errors + wrong_aliases(model), output.detach(), gradients
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    trainer, *_ = deepspeed.initialize(model=model, config=config)
    output = trainer(x)
    trainer.backward(output.sum())
    gradients = {name: safe_get_full_grad(p).clone() for name, p in model.named_parameters()}
    trainer.step()
    return errors + wrong_aliases(model), output.detach(), gradients


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "zero_stage"), ENGINES)
def test_training_uses_aliased_tensors(engine: str, zero_stage: int) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(t.shape, generator=generator) / 3 for n, t in Model().state_dict().items()}
    x = torch.randn(3, 2, 5, generator=generator)
    reference = Model()
    reference.load_state_dict(state)
    expected = reference(x)
    expected.sum().backward()
    for errors, output, gradients in run_ranks(train, 2, state, engine, zero_stage, x):
        assert not errors
        torch.testing.assert_close(output, expected.detach())
        for name, p in reference.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, msg=name)


class Cached(nn.Linear):
    """Caches its transposed weight, which engines cannot update."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.transposed = {"weight": [self.weight.detach().t()]}


def load_cached(engine: str, zero_stage: int) -> str:
    state = nn.Linear(3, 4).state_dict()
    with pytest.raises(zerostart.ZerostartError) as caught:
        zerostart.load(state, Cached, engine=engine, zero_stage=zero_stage, progress=False)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "zero_stage"), [("fsdp2", 3), ("deepspeed", 3), ("deepspeed", 2)])
def test_view_of_a_parameter_is_refused_by_name(engine: str, zero_stage: int) -> None:
    for message in run_ranks(load_cached, 2, engine, zero_stage):
        assert "transposed['weight'][0] is a view of the parameter weight" in message


# A checkpoint with both names of a tied pair is loaded like by transformers.
def write_with_head(checkpoints: TinyCheckpoints, out: Path, change: float) -> Path:
    """Write the tied Qwen3 with a separate, changed head."""
    source = checkpoints("qwen3")
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        tensors |= load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += change
    save_file({**tensors, "lm_head.weight": head}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    return out


def load_tied(path: Path, engine: str) -> tuple[bool, dict[str, torch.Tensor]]:
    model = zerostart.load(path, engine=engine, progress=False)
    full = {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}
    return model.lm_head.weight is model.model.embed_tokens.weight, full


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("change", [0.0, 1.0])
def test_both_tied_names(checkpoints: TinyCheckpoints, tmp_path: Path, engine: str, change: float) -> None:
    path = write_with_head(checkpoints, tmp_path / "both", change)
    reference = AutoModelForCausalLM.from_pretrained(path)
    expected = reference.state_dict()
    for tied, full in run_ranks(load_tied, 2, path, engine):
        assert tied == (reference.lm_head.weight is reference.model.embed_tokens.weight)
        assert full.keys() == expected.keys()
        for name, tensor in full.items():
            assert torch.equal(tensor, expected[name]), name
