"""transformers' own arguments for parallel axes, as those of a load."""

import os
from typing import Any

import pytest
import torch.distributed as dist

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import ConfigError
from zerostart.integrations.transformers.loading import ParallelArguments as Asked
from zerostart.integrations.transformers.loading import take_parallel_arguments

FLAG = {"enable_expert_parallel": True}
GIVEN = {"ep_size": 4, "tp_size": 2, "fsdp_size": 4}
#: What is asked of 8 ranks; a mesh as its sizes and names.
ASKED: dict[str, tuple[dict[str, Any], Asked]] = {
    "nothing": ({"dtype": "auto"}, Asked()),
    "the flag": ({"distributed_config": FLAG}, Asked(8)),
    "on its last dimension": (
        {"distributed_config": FLAG, "device_mesh": ((4, 2), ("dp", "ep"))},
        Asked(2),
    ),
    "a size": ({"distributed_config": {"ep_size": 4, "fsdp_size": 8}}, Asked(4)),
    "both": ({"distributed_config": GIVEN}, Asked(4, 2)),
    "experts alone": (
        {"distributed_config": {"ep_size": 4, "tp_size": 4, "tp_plan": {}}},
        Asked(4),
    ),
    "plans": (
        {"distributed_config": {**GIVEN, "tp_plan": {"a": "rowwise"}, "ep_plan": {"b": "grouped_gemm"}}},
        Asked(4, 2, {"b": "grouped_gemm"}, {"a": "rowwise"}),
    ),
    "auto": ({"tp_plan": "auto"}, Asked(1, 8)),
    "auto on a mesh": ({"tp_plan": "auto", "device_mesh": ((2, 4), ("dp", "tp"))}, Asked(1, 4)),
    "a plan": (
        {"tp_plan": {"lm_head": "colwise"}, "tp_size": 2},
        Asked(1, 2, None, {"lm_head": "colwise"}),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stages": (
        {"distributed_config": {"pp_size": 2}},
        "pp_size=2, but pipeline parallelism is not available",
    ),
    "offloading": (
        {"distributed_config": {"fsdp_size": 8, "fsdp_cpu_offload": True}},
        "has fsdp_cpu_offload",
    ),
    "replicas": ({"distributed_config": {"fsdp_size": 4, "dp_replicate_size": 2}}, "dp_replicate_size=2"),
    "batches": ({"distributed_config": {"fsdp_size": 4, "tp_size": 4}}, "fsdp_size=4, but 8 ranks with"),
    "no axis": ({"distributed_config": {}}, "has no axis of more than one rank"),
    "no name": (
        {"distributed_config": FLAG, "device_mesh": ((2, 4), ("a", "b"))},
        "none of them is named ep",
    ),
    "no neighbours": (
        {"distributed_config": FLAG, "device_mesh": ((4, 2), ("ep", "dp"))},
        r"groups the ranks \[0, 2, 4, 6\]",
    ),
}


def asked(arguments: dict[str, Any]) -> Asked:
    arguments = dict(arguments)
    if "device_mesh" in arguments:
        sizes, names = arguments["device_mesh"]
        arguments["device_mesh"] = dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    found = take_parallel_arguments(arguments, 8)
    assert arguments.keys() <= {"dtype"}
    return found


def translated() -> dict[str, Asked]:
    """On one rank of 8, none of which has to be there for that."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["WORLD_SIZE"] = "8"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with zerostart.enabled():
        for arguments, text in REFUSED.values():
            with pytest.raises(ConfigError, match=text):
                asked(arguments)
        return {case: asked(arguments) for case, (arguments, _) in ASKED.items()}


@pytest.mark.slow
def test_what_the_arguments_ask_for() -> None:
    (found,) = run_ranks(translated, 1, process_group=False)
    assert found == {case: wanted for case, (_, wanted) in ASKED.items()}
