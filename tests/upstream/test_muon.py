"""DeepSpeed's Muon, imported without torch's compiler."""

import subprocess
import sys

import pytest

START = """
import os, sys, torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
os.environ["MASTER_PORT"] = "0"
import deepspeed, zerostart
weights = {"weight": torch.ones(4, 4), "bias": torch.zeros(4)}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": STAGE}}
config["zero_allow_untested_optimizer"] = True
model = zerostart.load(weights, lambda: torch.nn.Linear(4, 4), engine="deepspeed", zero_stage=STAGE,
                       engine_config=config, progress=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
print("deepspeed.runtime.zero.muon.original_muon" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_start_of_deepspeed_imports_no_compiler(stage: int) -> None:
    code = START.replace("STAGE", str(stage))
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "True False"


UPDATE = """
import sys, torch
from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed
from zerostart.upstream.deepspeed.muon import import_muon
import_deepspeed()
import_muon()
assert "torch._inductor.compile_fx" not in sys.modules
from deepspeed.runtime.zero.muon import original_muon as muon
torch.manual_seed(0)
update = muon.muon_update(torch.randn(8, 8), torch.zeros(8, 8))
functions = [muon.muon_update, muon.zeropower_via_newtonschulz5, muon.zeropower_via_gram_newtonschulz]
print(all(hasattr(function, "_torchdynamo_orig_callable") for function in functions), update.sum().item())
"""
#: The same with DeepSpeed's own import.
OURS = ("import_muon()", "assert")
STOCK = "".join(line for line in UPDATE.splitlines(True) if not line.startswith(OURS))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_muon_is_compiled_when_it_is_called() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300, check=True
        ).stdout.split()[-2:]
        for code in (UPDATE, STOCK)
    ]
    assert printed[0] == printed[1]
    assert printed[0][0] == "True"
