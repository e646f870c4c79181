"""What DeepSpeed cuts of a model, held against the plan that the model itself declares.

A preset, or a user's rules, may fit the names of a model and not its structure: a norm of heads that each
rank runs on its own heads gets a part of its gradient, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from zerostart.errors import ConfigError
from zerostart.geometry.layout import expand, shard_spec_of

REMEDY = "use engine='fsdp2', which runs it by its own plan, or tensor_parallel=1"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SUMMED = "_ds_grad_allreduce_registered"


def check_rules(
    model: nn.Module, tried: nn.Module, plan: Mapping[str, str], sliced: Collection[str], size: int
) -> None:
    """Raise ConfigError where ``tried``, which DeepSpeed has cut, would not train as ``plan`` has it.

    ``sliced`` are names of parameters of ``model``, which is on meta in its true shapes.
    """
    wrong = next(_wrong(model, tried, plan, sliced), None)
    if wrong is not None:
        raise ConfigError(
            f"tensor_parallel={size}: {type(model).__name__} would train wrong with the "
            f"rules of tensors in engine_config, which {wrong}; {REMEDY}"
        )


def _wrong(
    model: nn.Module, tried: nn.Module, plan: Mapping[str, str], sliced: Collection[str]
) -> Iterator[str]:
    cut = {name.rpartition(".")[0] for name in sliced}
    # What gathers its result leaves what is beside it as it was.
    partial = {name for name in cut if not getattr(tried.get_submodule(name), "gather_output", False)}
    beside = {name.rpartition(".")[0] for name in partial} - {""}
    for name, module in model.named_modules():
        style = expand(plan, name, parameter=False)
        if style is None or name.rpartition(".")[0] not in beside:
            continue
        became = tried.get_submodule(name)
        if style == "replicated_with_grad_allreduce":
            if not all(hasattr(p, _SUMMED) for p in became.parameters() if p.requires_grad):
                yield f"sum no gradients of {name}, which each rank runs on its own heads"
        elif style == "mla_kv_a_proj":
            yield f"sum no gradients behind {name}, of whose result each rank uses a part"
        elif style in _GATHERED and name in partial and not _complete(model, became, name):
            yield f"cut {name}, and do not gather its result, which is used whole"
        elif isinstance(module, nn.Linear) and name not in cut and shard_spec_of(style, name, 2) is not None:
            yield f"leave {name} whole, and cut what is beside it"
    for name, parameter in model.named_parameters():
        style, owner = plan.get(name) or expand(plan, name, parameter=True), name.rpartition(".")[0]
        whole = style is not None and owner in beside and name not in sliced
        if whole and shard_spec_of(str(style), name, parameter.dim()) is not None:
            yield f"leave {name} whole, and cut what is beside it"


def _complete(model: nn.Module, became: Any, name: str) -> bool:
    """Whether a cut layer has fused parts that are cut each by itself."""
    if not type(became).__name__.startswith("SubParam"):
        return False
    heads, keys = _heads(model)
    return "qkv" not in name or heads == keys


def check_structure(model: nn.Module, size: int) -> None:
    """Raise ConfigError for a model whose attention looks at the number of a head, which ranks count anew."""
    if any(hasattr(module, "build_alibi_tensor") for module in model.modules()):
        raise ConfigError(
            f"tensor_parallel={size}: {type(model).__name__} has a bias of positions for each head (ALiBi), "
            "of which every rank would take the first heads'; use tensor_parallel=1"
        )


def check_dropout(model: nn.Module, size: int) -> None:
    """Raise ConfigError for heads that ranks share unevenly, and drop out: their draws would differ."""
    heads, keys = _heads(model)
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    config = _text(model)
    dropped = next((name for name in names if getattr(config, name, 0)), None)
    if dropped and any(isinstance(n, int) and n % size for n in (heads, keys)):
        raise ConfigError(
            f"tensor_parallel={size} does not divide the heads of {type(model).__name__}, and its {dropped} "
            "draws for each: ranks would drop out different parts of what they share; set it to 0, or use "
            "tensor_parallel=1"
        )


def _heads(model: nn.Module) -> tuple[Any, Any]:
    config = _text(model)
    heads = getattr(config, "num_attention_heads", None)
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _text(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
