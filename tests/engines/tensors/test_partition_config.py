"""DeepSpeed's ``partition_config`` as a plan cuts what DeepSpeed's own AutoTP layers cut."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import examples
from zerostart.errors import ConfigError
from zerostart.geometry.layout.partition_config import PRESETS, Linear, partition_plan


def sectioned(plan: Any, name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The elements that a plan gives to a rank, as its local tensor."""
    cut = plan.cuts.get(name)
    if cut is None:
        return whole
    section = cut.section(tuple(whole.shape), rank, size)
    local = torch.full(section.shape, -1, dtype=whole.dtype)
    for box, place in section.boxes:
        source = tuple(slice(o, o + n) for o, n in zip(box.origin, box.extent, strict=True))
        target = tuple(slice(p, p + n) for p, n in zip(place, box.extent, strict=True))
        local[target] = whole[source]
    return local


class Layers(torch.nn.Module):
    """Linear layers under the names of models, with element numbers for weights."""

    def __init__(self, shapes: dict[str, tuple[int, int]], bias: bool) -> None:
        super().__init__()
        for name, (outputs, inputs) in shapes.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            linear = torch.nn.Linear(inputs, outputs, bias=bias)
            linear.weight.data = torch.arange(outputs * inputs, dtype=torch.float32).view(outputs, inputs)
            if bias:
                linear.bias.data = torch.arange(outputs, dtype=torch.float32)
            module.add_module(leaf, linear)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSpeed's layers look for a process group even where they only cut."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def theirs(
    section: dict[str, Any], shapes: dict[str, tuple[int, int]], bias: bool, rank: int, size: int
) -> Any:
    """Local tensors that DeepSpeed's layers cut, by name, for ``rank`` of ``size``."""
    from deepspeed.module_inject import layers
    from deepspeed.module_inject.autotp_config import PartitionType
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    config = TPTrainingConfig(**section).get_partition_config_object()
    meta = AutoTPMeta(num_kv_heads=None, tp_grain_size=1)
    model = Layers(shapes, bias)
    found = {}
    for name in shapes:
        module = model.get_submodule(name)
        weight, offset = module.weight.data, module.bias.data if bias else None
        spec = config.find_matching_spec(f"{name}.weight", None) if config else None
        if spec is not None and spec.partition_type != PartitionType.SKIP:
            dim = spec.get_partition_dim()
            if spec.shape is None:
                widths = [meta_size(weight.shape[dim], size, meta, name)]
                logical, outputs, sizes, bias_dim = tuple(weight.shape), weight.shape[:1], None, 0
                bias_dim = 0 if spec.partition_type == PartitionType.COLUMN else None
            else:
                logical, outputs, sizes, bias_dim = layers._infer_subparam_logical_shapes(
                    tuple(weight.shape), spec.shape, dim, name
                )
                widths = [meta_size(s, size, meta, name) for s in sizes or (logical[dim],)]
            part = layers._partition_logical_tensor(
                weight.reshape(logical), dim, size, rank, widths, subparam_sizes=sizes
            )
            weight = part.reshape(-1, part.shape[-1])
            if offset is not None and bias_dim is not None:
                part = layers._partition_logical_tensor(
                    offset.reshape(outputs), bias_dim, size, rank, widths, subparam_sizes=sizes
                )
                offset = part.reshape(-1)
        found[f"{name}.weight"] = weight
        if offset is not None:
            found[f"{name}.bias"] = offset
    return found


def meta_size(total: int, size: int, meta: Any, name: str) -> list[int]:
    from deepspeed.module_inject.tp_shard import get_shard_size_list

    sizes: list[int] = get_shard_size_list(total, size, meta, name)
    return sizes


def check(section: dict[str, Any], shapes: dict[str, tuple[int, int]], bias: bool, size: int) -> None:
    plan = partition_plan(section, {n: Linear(s, bias) for n, s in shapes.items()}, size)
    whole = {n: p.data for n, p in Layers(shapes, bias).named_parameters()}
    for rank in range(size):
        for name, local in theirs(section, shapes, bias, rank, size).items():
            assert torch.equal(sectioned(plan, name, whole[name], rank, size), local), (name, rank)


MODELS = {
    "llama": ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "qwen2": ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
    "bloom": (
        "self_attention.query_key_value",
        "self_attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "chatglm": (
        "self_attention.query_key_value",
        "self_attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "mixtral": (
        "self_attn.v_proj",
        "block_sparse_moe.experts.3.w1",
        "block_sparse_moe.experts.3.w2",
        "block_sparse_moe.gate",
    ),
    "deepseek_v2": (
        *("self_attn.q_a_proj", "self_attn.kv_b_proj", "mlp.experts.11.down_proj", "mlp.gate"),
        *("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    ),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, bias: bool) -> None:
    shapes = {f"model.layers.0.{name}": (24, 12) for name in MODELS[preset]}
    check({"preset_model": preset}, {**shapes, "lm_head": (8, 12)}, bias, 2)


def test_presets_are_deepspeeds() -> None:
    from deepspeed.module_inject.autotp_config import AutoTPPresets

    for name, rules in PRESETS.items():
        specs = AutoTPPresets.get_preset(name).layer_specs
        assert [(list(r.patterns), r.kind, r.shape, r.dim) for r in rules] == [
            (s.patterns, s.partition_type.value, s.shape, s.partition_dim) for s in specs
        ]


NUMBERS = st.integers(1, 4)


@st.composite
def specs(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, int], int]:
    """A rule, a weight that it fits, and a number of ranks that divides its parts."""
    size, inputs = draw(st.integers(1, 3)), draw(NUMBERS)
    form = draw(st.sampled_from(["plain", "equal", "unequal", "experts", "row"]))
    parts = [size * draw(NUMBERS) for _ in range(draw(st.integers(1, 3)))]
    spec: dict[str, Any] = {"patterns": [r".*\.up$"[:-1] + r"\.weight$"], "partition_type": "column"}
    if form == "plain":
        return spec, (parts[0], inputs), size
    if form == "equal":
        count = draw(NUMBERS)
        return {**spec, "shape": [count, -1], "partition_dim": 0}, (count * parts[0], inputs), size
    if form == "unequal":
        return {**spec, "shape": [parts, -1], "partition_dim": 0}, (sum(parts), inputs), size
    if form == "experts":
        count = draw(NUMBERS)
        shape = [count, -1, inputs]
        return {**spec, "shape": shape, "partition_dim": 1}, (count * parts[0], inputs), size
    spec["partition_type"] = "row"
    if draw(st.booleans()):
        return {**spec, "shape": [-1, parts], "partition_dim": 1}, (inputs, sum(parts)), size
    return spec, (inputs, parts[0]), size


@settings(max_examples=examples(150))
@given(specs(), st.booleans())
def test_any_rule_cuts_as_deepspeed_does(
    found: tuple[dict[str, Any], tuple[int, int], int], bias: bool
) -> None:
    spec, shape, size = found
    check({"partition_config": {"layer_specs": [spec]}}, {"mlp.up": shape, "mlp.other": (4, 4)}, bias, size)


def test_own_rules_come_before_the_presets() -> None:
    spec = {"patterns": [r".*q_proj\.weight$"], "partition_type": "row"}
    linears = {f"a.self_attn.{n}_proj": Linear((8, 8)) for n in "qo"}
    section: dict[str, Any] = {"preset_model": "llama", "partition_config": {"layer_specs": [spec]}}
    plan = partition_plan(section, linears, 2)
    assert {n: c.dim for n, c in plan.cuts.items()} == {
        "a.self_attn.q_proj.weight": 1,
        "a.self_attn.o_proj.weight": 1,
    }
    section["partition_config"]["use_default_specs"] = False
    assert list(partition_plan(section, linears, 2).cuts) == ["a.self_attn.q_proj.weight"]


def test_model_types_heads_and_norms() -> None:
    rules = [
        {"patterns": [r".*up\.weight$"], "model_types": ["Llama"]},
        {"patterns": [r"lm_head\.weight$"], "gather_output": True},
        {"patterns": [r".*q_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
    ]
    section = {"partition_config": {"layer_specs": rules}}
    linears = {"a.up": Linear((8, 4)), "lm_head": Linear((8, 4))}
    plan = partition_plan(section, linears, 2, "llama", ["a.up", "a.q_norm"])
    assert plan.modules == {
        "a.up": "colwise",
        "lm_head": "colwise_gather_output",
        "a.q_norm": "replicated_with_grad_allreduce",
    }
    assert list(partition_plan(section, linears, 2, "qwen3").cuts) == ["lm_head.weight"]
    assert not partition_plan(section, linears, 2, "qwen3", tied=["lm_head"]).cuts


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"preset": "llama"}, "tensor_parallel has unknown keys preset"),
        ({"preset_model": "gpt9"}, "preset_model='gpt9' is unknown"),
        ({"partition_config": {"layer_specs": [{"pattern": "x"}]}}, "layer_specs has unknown keys pattern"),
        ({"partition_config": {"layer_specs": [{"patterns": ["("]}]}}, "is not a regular expression"),
        (
            {"partition_config": {"layer_specs": [{"patterns": [], "partition_type": "both"}]}},
            "'both' is unknown",
        ),
        ({"partition_config": {"strict_mode": True}}, "no rule for a.up.weight"),
        ({"partition_config": {"layer_specs": [{"patterns": ["a"]}]}}, "does not divide a part of 9 of a.up"),
        (
            {
                "partition_config": {
                    "layer_specs": [{"patterns": ["a"], "shape": [2, -1], "partition_dim": 2}]
                }
            },
            "which has no dimension 2",
        ),
        (
            {"partition_config": {"layer_specs": [{"patterns": ["a"], "shape": [2, 5], "partition_dim": 0}]}},
            "which does not fit",
        ),
        (
            {
                "partition_config": {
                    "layer_specs": [{"patterns": ["a"], "shape": [2, -1], "partition_dim": 0}]
                }
            },
            "9 cannot be divided into 2 equal parts",
        ),
        (
            {
                "partition_config": {
                    "layer_specs": [{"patterns": ["a"], "shape": [3, -1], "gather_output": True}]
                }
            },
            "both gather_output and shape for a.up, which exclude each other",
        ),
    ],
)
def test_refusals(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        partition_plan(section, {"a.up": Linear((9, 4))}, 2)
