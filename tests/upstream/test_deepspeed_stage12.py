"""Fails when DeepSpeed's stages 1 and 2 move: names, and the order of what the overrides count on."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch

from zerostart.upstream import deepspeed_stage12 as ds12
from zerostart.upstream.deepspeed import import_deepspeed


def in_order(source: str, *calls: str) -> bool:
    places = [source.find(call) for call in calls]
    return -1 not in places and places == sorted(places)


@pytest.fixture
def parts() -> tuple[type, type, type]:
    import_deepspeed()
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return DeepSpeedZeroOptimizer, BF16_Optimizer, DeepSpeedEngine


def test_the_installed_version_is_known() -> None:
    ds12.known.cache_clear()
    assert ds12.known()


def test_the_zero_optimizer_flattens_as_we_know_it(parts: tuple[type, type, type]) -> None:
    constructor = inspect.getsource(inspect.unwrap(parts[0].__init__))
    assert in_order(
        constructor,
        "trainable_parameters.append(param)",
        "self.bit16_groups.append(trainable_parameters)",
        "accelerator.available_memory() if accelerator.is_available()",
        "self._round_robin_reorder(",
        "self.flatten_dense_tensors_aligned(self.round_robin_bit16_groups[i]",
        "self.bit16_groups_flat.append(flattened_buffer)",
        "self._update_model_bit16_weights(i)",
        "data_parallel_partitions = self.get_data_parallel_partitions(self.bit16_groups_flat[i], i)",
        "weights_partition = self.parallel_partitioned_bit16_groups[i][partition_id].detach().clone().to(",
        "self.single_partition_of_fp32_groups.append(weights_partition)",
        "self._grad_acc_hooks = []",
        "self.initialize_optimizer_states()",
    )
    assert constructor.count(".detach().clone()") == 1
    states = inspect.getsource(parts[0].initialize_optimizer_states)  # type: ignore[attr-defined]
    assert in_order(
        states,
        "single_grad_partition = torch.zeros(",
        "self.single_partition_of_fp32_groups[i].grad = ",
        "if isinstance(self.optimizer, torch.optim.Adagrad):",
        "if not self.cpu_offload:",
        "group.grad = None",
        "return",
    )
    names = inspect.signature(parts[0].__init__).parameters
    assert {
        "init_optimizer",
        "dp_process_group",
        "round_robin_gradients",
        "parameter_alignment",
        "has_moe_layers",
        "zenflow_config",
    } <= set(names)
    assert "self.nccl_start_alignment_factor = 2 " in constructor
    assert (
        "param_alignment = 16 // math.gcd(16, element_size) if self.parameter_alignment else 1" in constructor
    )


def test_the_bf16_optimizer_flattens_as_we_know_it(parts: tuple[type, type, type]) -> None:
    setup = inspect.getsource(parts[1]._setup_for_real_optimizer)  # type: ignore[attr-defined]
    assert in_order(
        setup,
        "is_optimized_parameter(param)",
        "self.bf16_groups.append(trainable_parameters)",
        "self._flatten_dense_tensors_aligned(self.bf16_groups[i]",
        "self._update_storage_to_flattened_tensor(tensor_list=self.bf16_groups[i]",
        "self.fp32_groups_flat_partition.append(",
    )
    assert {"init_optimizer", "dp_process_group", "has_moe_layers"} <= set(
        inspect.signature(parts[1].__init__).parameters
    )


def test_the_engine_is_as_we_know_it(parts: tuple[type, type, type]) -> None:
    engine = parts[2]
    broadcast = inspect.getsource(inspect.unwrap(engine._broadcast_model))  # type: ignore[attr-defined]
    assert "elif hasattr(p, 'ds_optim_param'):" in broadcast
    assert "group=self.seq_data_parallel_group" in broadcast
    constructor = inspect.getsource(inspect.unwrap(engine.__init__))
    assert in_order(
        constructor,
        "self.dist_backend = ",
        "self._configure_distributed_model(model)",
        "self.module_forward_pre_hook = ",
        "self.module_forward_post_hook = ",
    )
    assert {"model", "optimizer"} <= set(inspect.signature(engine.__init__).parameters)
    casting = inspect.getsource(engine._cast_module_mixed_precision)  # type: ignore[attr-defined]
    assert "p.dtype in CASTABLE_DTYPES and p.dtype != param_dtype" in casting


def test_other_versions_take_the_stock_route_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.21.0")
    ds12.known.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "zerostart"):
            parameter = torch.nn.Parameter(torch.zeros(2))
            for _ in range(3):
                ds12.mark(parameter, "p", None)  # type: ignore[arg-type]
        assert ds12.marked(parameter) is None
        assert len(caplog.records) == 1
        assert "deepspeed 0.21.0 is installed" in caplog.text
        assert "initialize will flatten the parameters of stages 1 and 2 itself" in caplog.text
    finally:
        ds12.known.cache_clear()


def test_storages_tell_their_users() -> None:
    from zerostart.upstream.torch import storage_users

    tensor = torch.zeros(8)
    storage = tensor.untyped_storage()
    assert storage_users(storage) == 2
    view = tensor[2:4]
    assert storage_users(storage) == 3
    del view
    assert storage_users(storage) == 2
