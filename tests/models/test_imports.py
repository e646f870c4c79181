"""Libraries that a load imports, in a fresh process."""

import subprocess
import sys

from tests.tiny import TinyCheckpoints

PLAIN = """
import sys, torch, zerostart
calls = []
def make():
    calls.append(1)
    {statement}
    return torch.nn.Linear(2, 2)
torch.manual_seed(0)
state = {{name: tensor.clone() for name, tensor in torch.nn.Linear(2, 2).state_dict().items()}}
model = zerostart.load(state, make, engine="fsdp2", progress=False)
tensors = dict(zerostart.full_tensors(model))
assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())
print(len(calls), *sorted({{"transformers", "accelerate", "diffusers", "peft"}} & sys.modules.keys()))
"""


def printed(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    return finished.stdout.strip()


def test_a_plain_module_imports_no_library_of_models() -> None:
    assert printed(PLAIN.format(statement="pass")) == "1"


def test_a_constructor_that_only_uses_transformers_runs_once() -> None:
    assert printed(PLAIN.format(statement="import transformers")).startswith("1 ")


PRETRAINED = """
import torch, zerostart
from safetensors.torch import load_file
def make():
    from transformers import AutoConfig, AutoModelForCausalLM
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({path!r}))
model = zerostart.load(load_file({path!r} + "/model.safetensors"), make, engine="fsdp2", progress=False)
tensors = dict(zerostart.full_tensors(model))
state = make().from_pretrained({path!r}).state_dict()
assert tensors.keys() == state.keys() and all(torch.equal(tensors[n], t) for n, t in state.items())
print(dict(model.named_buffers())["model.rotary_emb.inv_freq"].equal(make().model.rotary_emb.inv_freq))
"""


def test_a_constructor_that_imports_transformers_itself(checkpoints: TinyCheckpoints) -> None:
    assert printed(PRETRAINED.format(path=str(checkpoints("qwen3")))) == "True"
