"""Modules that every rank needs, imported once in the server that forks the ranks.

They would cost every rank seconds: torch's compiler, which the first DeepSpeed engine imports, takes two.
Nothing here starts a thread or touches an accelerator.
"""

import functools
import gc
import importlib
import os

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
    "transformers.trainer",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "accelerate",
    "hypothesis",
    "pytest",
    "zerostart.engines.deepspeed.parallel",
    "zerostart.engines.deepspeed.flat",
    "zerostart.engines.fsdp2.storage",
    "zerostart.engines.fsdp2.parallel",
    "zerostart.loading.forecast.job",
    "zerostart.integrations.adoption",
    "zerostart.loading.run",
    # Imported by a load or an engine in each rank.
    "deepspeed.module_inject.auto_ep_layer",
    "torch._subclasses.schema_check_mode",
    "torch.utils.cpp_extension",
    "zerostart.engines.deepspeed.family",
    "zerostart.engines.deepspeed.memory",
    "zerostart.engines.deepspeed.memory",
    "zerostart.engines.deepspeed.parallel",
    "zerostart.engines.deepspeed.training",
    "zerostart.models.libraries.plain",
    "zerostart.models.libraries.diffusers",
    "zerostart.models.libraries.transformers",
    "zerostart.state.comparing.digest",
    "zerostart.live.full_tensors",
    "zerostart.state.resuming.load_state",
    "zerostart.state.saving.save",
)

for name in MODULES:
    importlib.import_module(name)

# Searches for compilers and libraries, and caches the result.
_ = importlib.import_module("deepspeed.ops").__compatible_ops__

# The first call compiles all conversions of transformers, some hundreds of patterns.
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3_moe")

# Every rank that loads DeepSpeed's operation calls it twice, and each call starts a process.
_cpuinfo = importlib.import_module("cpuinfo")
_cpuinfo.get_cpu_info = functools.cache(_cpuinfo.get_cpu_info)
_cpuinfo.get_cpu_info()

# DeepSpeed's only CPU operation. Ranks that compile it at the same time wait for each other, and one that is
# killed meanwhile leaves a lock.
if os.environ.get("DS_ACCELERATOR") == "cpu":
    importlib.import_module("zerostart.upstream.deepspeed.zero3_partitions").load_operations(
        ("ShareMemCommBuilder",)
    )

# The collector touches every object, and so copies each shared page: half a second a rank for each collection
# in ``deepspeed.initialize``.
gc.collect()
gc.freeze()
