"""DeepSpeed's ``tensor_parallel`` section as a plan: regular expressions, row or column, fused parts.

Source: DeepSpeed 0.19, ``module_inject/autotp_config.py`` (``TPLayerSpec``, ``AutoTPConfig``, presets),
``module_inject/layers.py`` (``_infer_subparam_logical_shapes``, ``_partition_logical_tensor``) and
``runtime/tensor_parallel/config.py`` (``get_partition_config_object``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from zerostart.errors import ConfigError
from zerostart.geometry.layout.parallel_plans import ParallelPlan, ShardSpec

Shape = tuple[int | tuple[int, ...], ...]
_KEYS = {"partition_config", "preset_model", "autotp_size", "tp_size", "enabled"}
_CONFIG_KEYS = {"layer_specs", "use_default_specs", "strict_mode", "tp_size", "lm_head_patterns"}
_SPEC_KEYS = {
    *("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output"),
    "grad_allreduce",
}
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class Linear:
    """A linear layer of the model: the shape of its weight (outputs, inputs), and whether it has a bias."""

    shape: tuple[int, int]
    bias: bool = False


@dataclass(frozen=True)
class _Rule:
    patterns: tuple[str, ...]
    kind: str = "column"
    shape: Shape | None = None
    dim: int | None = None
    model_types: tuple[str, ...] = ()
    gather: bool = False
    summed: bool = False

    def matches(self, name: str, model_type: str | None) -> bool:
        if self.model_types and (model_type or "").lower() not in self.model_types:
            return False
        return any(re.match(pattern, name) for pattern in self.patterns)


def _preset(*rules: tuple[str, str] | tuple[str, str, int]) -> tuple[_Rule, ...]:
    return tuple(
        _Rule((rf".*\.{rule[0]}\.weight$",), rule[1])
        if len(rule) == 2
        else _Rule((rf".*\.{rule[0]}\.weight$",), rule[1], (rule[2], -1), 0)
        for rule in rules
    )


_LLAMA = _preset(
    (r"self_attn\.o_proj", "row"),
    (r"self_attn\.[qkv]_proj", "column"),
    (r"mlp\.down_proj", "row"),
    (r"mlp\.(up|gate)_proj", "column"),
)
#: DeepSpeed's built-in rules, by ``preset_model``.
PRESETS: Mapping[str, tuple[_Rule, ...]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "bloom": _preset(
        (r"self_attention\.dense", "row"),
        (r"self_attention\.query_key_value", "column"),
        (r"mlp\.dense_4h_to_h", "row"),
        (r"mlp\.dense_h_to_4h", "column"),
    ),
    "chatglm": _preset(
        (r"self_attention\.dense", "row"),
        (r"self_attention\.query_key_value", "column", 3),
        (r"mlp\.dense_4h_to_h", "row"),
        (r"mlp\.dense_h_to_4h", "column", 2),
    ),
    "mixtral": _preset(
        (r"self_attn\.o_proj", "row"),
        (r"self_attn\.[qkv]_proj", "column"),
        (r"block_sparse_moe\.experts\.\d+\.w2", "row"),
        (r"block_sparse_moe\.experts\.\d+\.w[13]", "column"),
        (r"block_sparse_moe\.gate", "skip"),
    ),
    "deepseek_v2": _preset(
        (r"self_attn\.o_proj", "row"),
        (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)", "skip"),
        (r"self_attn\.(q_b_proj|kv_b_proj)", "column"),
        (r"mlp\.experts\.\d+\.down_proj", "row"),
        (r"mlp\.experts\.\d+\.(up|gate)_proj", "column"),
        (r"mlp\.gate", "skip"),
        (r"mlp\.shared_experts\.down_proj", "row"),
        (r"mlp\.shared_experts\.(up|gate)_proj", "column"),
    ),
    "phi3": _preset(
        (r"self_attn\.o_proj", "row"),
        (r"self_attn\.qkv_proj", "column", 3),
        (r"mlp\.down_proj", "row"),
        (r"mlp\.gate_up_proj", "column", 2),
    ),
}


def partition_plan(
    section: Mapping[str, object],
    linears: Mapping[str, Linear],
    size: int,
    model_type: str | None = None,
    modules: Sequence[str] = (),
    tied: Collection[str] = (),
) -> ParallelPlan:
    """A plan out of DeepSpeed's ``tensor_parallel`` section, for ``size`` ranks.

    ``linears`` are the model's linear layers by name; ``modules`` all its modules, among which those with
    whole parameters are looked for whose gradients are to be summed (``grad_allreduce``); ``tied`` the layers
    that share their weight with an embedding, which stay whole if their output is gathered, as DeepSpeed
    leaves them. Raises ConfigError for a key that is unknown, a layer without a rule in ``strict_mode``, a
    shape that does not fit, and a part that ``size`` does not divide (DeepSpeed cuts it by rules of its own).
    """
    rules, strict, heads = _rules(section)
    cuts: dict[str, ShardSpec] = {}
    styles: dict[str, str] = {}
    for name, linear in linears.items():
        # The first rule that matches counts, as in DeepSpeed: a user's own come before those of the preset.
        rule = next((r for r in rules if r.matches(f"{name}.weight", model_type)), None)
        if rule is None and strict:
            raise ConfigError(
                f"partition_config has strict_mode, but no rule for {name}.weight; add one, or set "
                "strict_mode to false"
            )
        if rule is None or rule.kind == "skip" or (rule.gather and name in tied):
            continue
        if rule.gather and rule.shape is not None:
            raise ConfigError(
                f"partition_config has both gather_output and shape for {name}, which exclude each other; "
                "leave one out"
            )
        weight = _cut(name, linear.shape, rule, size)
        cuts[f"{name}.weight"] = weight
        # A bias goes with the rows of its weight; beside one that is cut by columns it stays whole, and is
        # added to the sum of all ranks.
        if linear.bias and weight.dim == 0:
            cuts[f"{name}.bias"] = weight
        styles[name] = _style(name, rule, heads)
    for name in modules:
        rule = next((r for r in rules if r.matches(f"{name}.weight", model_type)), None)
        if rule is not None and rule.kind == "skip" and rule.summed:
            styles[name] = "replicated_with_grad_allreduce"
    return ParallelPlan(cuts, styles)


def _style(name: str, rule: _Rule, heads: Sequence[str]) -> str:
    """transformers' style of forward that communicates as DeepSpeed's layer does."""
    if rule.kind == "row":
        return "rowwise_split_input" if name.rpartition(".")[2] in heads else "rowwise"
    if rule.gather:
        return "colwise_gather_output"
    return "colwise" if rule.shape is None else "packed_colwise"


def _cut(name: str, weight: tuple[int, int], rule: _Rule, size: int) -> ShardSpec:
    """The cut of a weight; sub-parameters and leading dimensions of a view become fused parts."""
    parts: tuple[int, ...]
    if rule.shape is None:
        dim = 0 if rule.kind == "column" else 1
        cut, parts = ShardSpec(dim), (weight[dim],)
    else:
        cut, parts = _fused(name, weight, rule, rule.shape)
    # Each fused part is cut by itself, and so has to be divisible by itself.
    for part in parts:
        if part % size:
            raise ConfigError(
                f"tensor_parallel={size} does not divide a part of {part} of {name}.weight {list(weight)}; "
                "set its partition_type to skip, or use another size"
            )
    return cut


def _fused(
    name: str, weight: tuple[int, int], rule: _Rule, shape: Shape
) -> tuple[ShardSpec, tuple[int, ...]]:
    """The cut of a weight that ``shape`` views as fused parts, and the sizes of the parts in that view."""
    dim = rule.dim if rule.dim is not None else (0 if rule.kind == "column" else 1)
    what = f"partition_config gives {name}.weight {list(weight)} the shape {shape}"
    if not 0 <= dim < len(shape):
        raise ConfigError(f"{what}, which has no dimension {dim}")
    logical = _logical_shape(shape, weight, dim)
    # DeepSpeed views [rows, columns] as the logical shape: its last dimension has to be the columns.
    if prod(logical) != prod(weight) or logical[-1] != weight[1]:
        raise ConfigError(f"{what}, which does not fit")
    entry = shape[dim]
    if isinstance(entry, tuple):
        # Parts of given sizes; a number says how many equal ones there are, -1 one.
        sizes = entry
    else:
        count = 1 if entry == -1 else entry
        if logical[dim] % count:
            raise ConfigError(f"{what}, but {logical[dim]} cannot be divided into {count} equal parts")
        sizes = (logical[dim] // count,) * count
    if dim == len(logical) - 1:
        return ShardSpec(1, _simplest(sizes)), sizes
    # Back to rows: those of a part follow each other in each of the ``outer`` blocks before the dimension,
    # and one step along it is ``inner`` rows.
    outer, inner = prod(logical[:dim]), prod(logical[dim + 1 : -1])
    return ShardSpec(0, _simplest(tuple(part * inner for part in sizes) * outer)), sizes


def _logical_shape(shape: Shape, weight: tuple[int, int], dim: int) -> list[int]:
    """The shape of a view of ``weight``, with what ``shape`` leaves open worked out; 0 where nothing says.

    Open are -1, and ``dim``, where a number is that of equal parts and not a size.
    """
    sizes = [
        sum(s) if isinstance(s, tuple) else (None if s == -1 or i == dim else s) for i, s in enumerate(shape)
    ]
    unknown = [i for i, value in enumerate(sizes) if value is None]
    rest = prod(value for value in sizes if value is not None)
    if len(unknown) == 1 and prod(weight) % rest == 0:
        sizes[unknown[0]] = prod(weight) // rest
    elif len(shape) == len(weight):
        sizes = [weight[i] if value is None else value for i, value in enumerate(sizes)]
    return [value or 0 for value in sizes]


def _simplest(parts: tuple[int, ...]) -> int | tuple[int, ...]:
    """The number of parts, if they are equal."""
    return len(parts) if len(set(parts)) == 1 else parts


def _rules(section: Mapping[str, Any]) -> tuple[tuple[_Rule, ...], bool, Sequence[str]]:
    """The rules in their order, whether a layer without one is an error, and the names of output heads."""
    _known("tensor_parallel", section, _KEYS)
    preset = section.get("preset_model")
    if preset is not None and str(preset).lower() not in PRESETS:
        raise ConfigError(f"preset_model={preset!r} is unknown; choose one of {', '.join(PRESETS)}")
    rules = PRESETS[str(preset).lower()] if preset is not None else ()
    given = section.get("partition_config")
    if not given:
        return rules, False, _HEADS
    _known("partition_config", given, _CONFIG_KEYS)
    own = tuple(_rule(spec) for spec in given.get("layer_specs", ()))
    merged = (*own, *rules) if given.get("use_default_specs", True) else own
    return merged, bool(given.get("strict_mode", False)), given.get("lm_head_patterns") or _HEADS


def _rule(spec: Mapping[str, Any]) -> _Rule:
    _known("partition_config.layer_specs", spec, _SPEC_KEYS)
    kind = str(spec.get("partition_type", "column")).lower()
    if kind not in ("column", "row", "skip"):
        raise ConfigError(f"partition_type {kind!r} is unknown; choose column, row or skip")
    shape = spec.get("shape")
    patterns = tuple(spec.get("patterns", ()))
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"partition_config: {pattern!r} is not a regular expression: {error}"
            ) from error
    return _Rule(
        patterns,
        kind,
        None if shape is None else tuple(tuple(s) if isinstance(s, (list, tuple)) else int(s) for s in shape),
        spec.get("partition_dim"),
        tuple(str(kind).lower() for kind in spec.get("model_types") or ()),
        bool(spec.get("gather_output", False)),
        bool(spec.get("grad_allreduce", False)),
    )


def _known(where: str, given: Mapping[str, object], keys: Collection[str]) -> None:
    if unknown := sorted(set(given) - set(keys)):
        raise ConfigError(
            f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(keys))}"
        )
