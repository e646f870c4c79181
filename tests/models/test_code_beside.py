"""Code next to a checkpoint runs only if the caller allows it, without a prompt."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerostart
from zerostart.cli import main
from zerostart.errors import BuildError

CODE = """
import pathlib
import torch
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path({mark!r}).touch()

class OwnConfig(PretrainedConfig):
    model_type = "own-of-a-stranger"
    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        # Values of tensors, as constructors of InternVL, MiniCPM and others read them.
        self.rates = [x.item() for x in torch.linspace(0, 0.5, 3)] + torch.arange(3.0).div(2).tolist()
        self.steps = int((torch.ones(4) * torch.tensor([1, 2, 3, 4])).sum())
        self.positive = bool(torch.full((1,), 3) > 2)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.post_init()
    def _init_weights(self, module):
        pass
    def forward(self, x):
        return self.layer(x)
"""
WEIGHTS = {"layer.weight": torch.eye(4), "layer.bias": torch.ones(4)}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    root = tmp_path / "strange"
    root.mkdir()
    (root / "own.py").write_text(CODE.format(mark=str(tmp_path / "was_run")))
    named = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {"model_type": "own-of-a-stranger", "architectures": ["OwnModel"], "auto_map": named, "width": 4}
    (root / "config.json").write_text(json.dumps(config))
    save_file(WEIGHTS, root / "model.safetensors", {"format": "pt"})
    return root


def test_no_code_is_run_and_nobody_is_asked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    refused = (
        r"config\.json: the model's class is code .*trust_remote_code=True \(--trust-remote-code\).*model="
    )
    with pytest.raises(BuildError, match=refused):
        zerostart.load(str(checkpoint), engine="fsdp2", progress=False)
    with pytest.raises(BuildError, match=refused):
        zerostart.plan(str(checkpoint), 2)
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(checkpoint), "--world-size", "2"])
    assert ended.value.code == 1
    assert "--trust-remote-code" in capsys.readouterr().err
    assert sys.stdin.read() == "y\ny\ny\n"
    assert not (checkpoint.parent / "was_run").exists()


def test_code_that_is_trusted_is_run(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zerostart.load(str(checkpoint), engine="fsdp2", progress=False, trust_remote_code=True)
    assert (checkpoint.parent / "was_run").exists()
    for name, tensor in zerostart.full_tensors(model):
        assert tensor is not None
        assert torch.equal(tensor, WEIGHTS[name])
    assert type(model).__name__.endswith("OwnModel")
    assert (model.rates, model.steps, model.positive) == ([0.0, 0.25, 0.5, 0.0, 0.5, 1.0], 10, True)
    plan = zerostart.plan(str(checkpoint), 2, trust_remote_code=True)
    assert sum(rank.read_bytes for rank in plan.ranks) >= 80
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(checkpoint), "--world-size", "2", "--trust-remote-code", "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["parameters"] == 20


def test_a_random_value_in_a_constructor_is_refused(checkpoint: Path) -> None:
    code = checkpoint / "own.py"
    code.write_text(code.read_text().replace("torch.full((1,), 3)", "torch.rand(1)"))
    with pytest.raises(BuildError, match=r"OwnModel cannot be built on the meta device.*values of tensors"):
        zerostart.load(str(checkpoint), engine="fsdp2", progress=False, trust_remote_code=True)


def test_what_is_asked_inside_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries, such as a pipeline's tokenizers, receive no permission."""
    import transformers

    from zerostart.upstream.transformers.models import refuse_questions

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with refuse_questions(), pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoConfig.from_pretrained(str(checkpoint))
    assert sys.stdin.read() == "y\n"
