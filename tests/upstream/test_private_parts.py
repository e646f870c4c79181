"""Fails when upstream moves: what ``zerostart.upstream`` uses is there, and means what we think."""

import importlib.util
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.deepspeed.zero3 import optimizer as ds3
from zerostart.upstream.deepspeed.zero3 import start
from zerostart.upstream.torch.fsdp2 import are_reduced_as_shards
from zerostart.upstream.transformers import models as hf


@pytest.mark.parametrize("glob", ["router", "layers.*.norm", "a.*.b.*"])
def test_dtype_globs_mean_what_the_library_means(glob: str) -> None:
    from transformers.core_model_loading import build_glob_alternation

    theirs, _, _ = build_glob_alternation([glob])
    plan = hf.dtype_plan(SimpleNamespace(_get_dtype_plan=lambda _: {glob: torch.float32}), torch.bfloat16)
    ((ours, _),) = plan
    for name in ("model.router.weight", "layers.3.norm.weight", "layers.norm", "a.1.b.2", "ab", "x.a.y.b.z"):
        assert bool(ours.search(name)) == bool(theirs.search(name)), name
    assert isinstance(ours, re.Pattern)


def test_a_zero3_optimizer_without_a_method_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ds3.require_stage3(), "offload_states")
    ds3.require_stage3.cache_clear()
    with pytest.raises(UnsupportedVersionError, match="Stage3 misses offload_states"):
        ds3.require_stage3()
    ds3.require_stage3.cache_clear()


def test_parameters_without_our_mark_are_left_to_the_optimizer() -> None:
    """In a process of its own: in this one a model of another test may have the method replaced already."""
    run_ranks(unmarked, 1, process_group=False)


def unmarked() -> None:
    """The one method that is replaced gives what it gave, and leaves the class of the optimizer alone."""
    optimizer = ds3.require_stage3()
    before = optimizer._get_trainable_parameter_groups
    elsewhere = torch.nn.Parameter(torch.zeros(1))
    ds3.mark(elsewhere, "elsewhere", None)
    wrapped = optimizer._get_trainable_parameter_groups
    assert wrapped is not before
    plain = object.__new__(optimizer)
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    plain.optimizer = SimpleNamespace(param_groups=[{"params": parameters, "lr": 1.0}])
    plain.dp_process_group = None
    assert wrapped(plain) == before(plain)
    assert type(plain) is optimizer
    del elsewhere
    assert optimizer._get_trainable_parameter_groups is before


def test_an_unknown_start_of_the_zero3_optimizer_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known as installed; where a method has another source, one warning, and DeepSpeed's own way."""
    assert start.known()
    monkeypatch.setattr(ds3.require_stage3(), "initialize_optimizer_states", lambda self: None)
    start.known.cache_clear()
    assert not start.known()
    assert not start.known()
    assert caplog.text.count("initialize_optimizer_states is not as it was") == 1
    start.known.cache_clear()


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_deepspeed_has_no_mics_any_more(key: str) -> None:
    """Why a load refuses it: the context and the optimizer are gone, and the configuration is refused.

    ``runtime/config.py``, ``_reject_removed_config_keys``.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    assert not hasattr(deepspeed.zero, "MiCS_Init")
    assert importlib.util.find_spec("deepspeed.runtime.zero.mics") is None
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, key: 2}}
    with pytest.raises(DeepSpeedConfigError, match="MiCS ZeRO-3 sharding has been removed"):
        DeepSpeedConfig(config)


def test_deepspeed_quantises_weights_by_cuda_kernels_alone() -> None:
    """Why a load refuses it elsewhere: ``CUDAQuantizer``, which ``zero.Init`` makes first, loads them."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    if get_accelerator().device_name() != "cpu":
        pytest.skip("an accelerator may have the kernels")
    with pytest.raises(ValueError, match="not been implemented on CPU"):
        CUDAQuantizer()


def test_deepspeed_has_no_secondary_partitions_on_nvme() -> None:
    """Why a load refuses them: they are made on the parameters' device, and torch knows no nvme."""
    from deepspeed.runtime.zero import partition_parameters

    source = inspect.getsource(partition_parameters)  # The method itself is wrapped.
    making = source[source.index("def _partition_param_sec") :]
    assert "device=self.remote_device)" in making[: making.index("def _param_status")]
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(1, device="nvme")


def test_the_dtype_that_gradients_travel_in() -> None:
    """A forecast counts them; torch 2.15 has changed it, where the policy names none."""
    run_ranks(travelling, 2)


def travelling() -> None:
    from torch import distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    seen = set()
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))
    original = getattr(dist, name)

    def reduce_scatter(*arguments: Any, **options: Any) -> Any:
        seen.update(tensor.dtype for tensor in (*arguments, *options.values()) if torch.is_tensor(tensor))
        return original(*arguments, **options)

    setattr(dist, name, reduce_scatter)
    try:
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(torch.ones(2, 8)).sum().backward()
    finally:
        setattr(dist, name, original)
    assert seen == {torch.float32 if are_reduced_as_shards() else torch.bfloat16}
