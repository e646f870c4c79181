"""What every rank needs, imported once in the server that ranks are forked from.

An import costs each rank its time again: torch's compiler, which the first DeepSpeed engine imports, two
seconds, and the modules under test half a second where byte code is not written. Nothing here starts a thread
or touches an accelerator.
"""

from __future__ import annotations

import functools
import gc
import importlib

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.integrations.deepspeed",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "accelerate",
    "hypothesis",
    "pytest",
    "zerostart.engines.deepspeed.experts",
    "zerostart.engines.deepspeed.flat",
    "zerostart.engines.fsdp2.engine",
    "zerostart.engines.fsdp2.parallel",
    "zerostart.forecast.run",
    "zerostart.integrations.adoption",
    "zerostart.loading.run",
)

for name in MODULES:
    importlib.import_module(name)

# Looks for compilers and libraries, and keeps what it has found.
_ = importlib.import_module("deepspeed.ops").__compatible_ops__

# Asked twice by every rank that loads DeepSpeed's operation, and a process of its own each time.
_cpuinfo = importlib.import_module("cpuinfo")
_cpuinfo.get_cpu_info = functools.cache(_cpuinfo.get_cpu_info)
_cpuinfo.get_cpu_info()

# The collector looks at every object that it knows, and so has each page of them copied: half a second a rank
# for each of the collections in ``deepspeed.initialize``.
gc.collect()
gc.freeze()
