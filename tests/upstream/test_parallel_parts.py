"""Fails when upstream moves: the plans that transformers declares, its styles, DeepSpeed's expert groups."""

import torch
import transformers
from packaging.version import Version

from tests.ranks import run_ranks
from zerostart.geometry.layout.parallel_plans import EXPERT_STYLES, TENSOR_STYLES
from zerostart.upstream.transformers import models as hf
from zerostart.upstream.transformers import tensor as transformers_tensor
from zerostart.upstream.transformers.tensor import require


def test_transformers_tensor_parallel_styles() -> None:
    require()
    # Of other ways to route tokens, which older releases register here: zerostart routes by itself.
    routers = {"ep_router", "megamoe_router", "megamoe_experts"}
    known = {*TENSOR_STYLES, *EXPERT_STYLES}
    assert set(transformers_tensor._styles()) <= {*known, *routers}
    if Version(transformers.__version__) >= Version("5.23"):
        assert set(transformers_tensor._styles()) == known


def test_transformers_declares_plans_on_models() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", num_hidden_layers=1))
    experts = hf.parallel_rules(model, "ep")
    assert experts["model.layers.*.mlp.experts.gate_up_proj"] == "grouped_gemm"
    assert hf.parallel_rules(model, "tp")["lm_head"] == "colwise_gather_output"


def test_deepspeed_groups_of_experts() -> None:
    found = run_ranks(expert_groups, 4)
    assert found == [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]


def expert_groups() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks of this rank's expert group, and of its owners, in a world of 4 with 2 that share experts."""
    import deepspeed
    from torch.distributed import get_process_group_ranks as ranks_of

    from zerostart.upstream.deepspeed.parallel.experts import ExpertGroups

    deepspeed.init_distributed("gloo", dist_init_required=False)
    groups = ExpertGroups(2)
    assert ExpertGroups(2).experts is groups.experts  # Made once.
    return tuple(ranks_of(groups.experts)), tuple(ranks_of(groups.owners))
