"""Fails when upstream moves: what ZeRO stage 2 does with parameters that are marked as experts."""

from __future__ import annotations

import inspect

import torch

from zerostart.upstream import deepspeed_flat_experts as parts


def test_marks_that_deepspeed_reads() -> None:
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.engine import DeepSpeedEngine

    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not is_moe_param(parameter)
    parameter.allreduce = False  # type: ignore[attr-defined]
    assert is_moe_param(parameter)
    broadcast = inspect.getsource(DeepSpeedEngine._broadcast_model)
    assert "group=self.expert_data_parallel_group[p.group_name]" in broadcast
    assert "hasattr(p, 'ds_optim_param')" in broadcast


def test_expert_groups_of_the_optimizer() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    settings = inspect.getsource(DeepSpeedZeroOptimizer._configure_moe_settings)
    assert "self.real_dp_process_group[i] = self.expert_dp_process_group[group['name']]" in settings
    assert "return 'moe' in group and group['moe']" in inspect.getsource(DeepSpeedZeroOptimizer.is_moe_group)
    reducing = inspect.getsource(DeepSpeedZeroOptimizer.average_tensor)
    # The sum over the ranks that have the same experts, divided by all ranks.
    assert "self.expert_dp_process_group[param.group_name] if is_moe_param" in reducing
    assert "tensor.div_(dist.get_world_size(group=self.dp_process_group)" in reducing
    configuring = inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)
    assert "has_moe_layers=self.has_moe_layers" in configuring
    assert "expert_data_parallel_group if self.has_moe_layers" in configuring


def test_groups_are_split_before_schedulers_count_them() -> None:
    parts._enter()
    dense, expert = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    expert.group_name = "ep_size_2"  # type: ignore[attr-defined]
    setattr(expert, parts._ATTRIBUTE, True)
    optimizer = torch.optim.AdamW([("a", dense), ("b", expert)], lr=0.5, weight_decay=0.1)
    first, second = optimizer.param_groups
    assert first["params"] == [dense]
    assert second["params"] == [expert]
    assert (second["moe"], second["name"], second["lr"], second["weight_decay"]) == (
        True,
        "ep_size_2",
        0.5,
        0.1,
    )
    assert "moe" not in first
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    scheduler.step()
    plain = torch.optim.SGD([dense], lr=0.1)
    assert len(plain.param_groups) == 1
    assert "moe" not in plain.param_groups[0]
