"""Building a model without its weights: parameters on the meta device, in the dtype of the load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.errors import BuildError, ConfigError
from zerostart.models.diffusion import construct, named_class, names_diffusers
from zerostart.models.operator_log import OperatorLog
from zerostart.upstream.diffusers import is_diffusers
from zerostart.upstream.transformers import is_pretrained, without_weights
from zerostart.upstream.transformers_quantizers import dequantizer, prepare

__all__ = ["Built", "ModelLike", "build", "require"]


@dataclass(frozen=True)
class Built:
    """A model on meta, and the log of its construction.

    ``dtype`` is the floating dtype that the load gives the model as a whole; None lets each tensor keep the
    dtype that the checkpoint stores. ``logged`` is False for a module that the caller had built before.
    ``quantizer`` is transformers' own, set to dequantise, for a checkpoint that is quantised.
    """

    model: nn.Module
    log: OperatorLog
    dtype: torch.dtype | None
    logged: bool
    quantizer: Any = None


ModelLike = nn.Module | type[nn.Module] | Callable[[], nn.Module] | Built | None


def build(
    model: ModelLike,
    root: str | None,
    dtype: torch.dtype | None,
    stored: torch.dtype | None,
    main: torch.dtype | None = None,
) -> Built:
    """Build ``model``, or without one the class that the configuration in ``root`` names.

    ``stored`` is the dtype of the checkpoint's first floating tensor, ``main`` that of most of its elements.
    One that is ``Built`` already is left as it is. Raises BuildError or ConfigError.
    """
    if isinstance(model, Built):
        return model
    log = OperatorLog()
    if model is None and names_diffusers(root):
        model = named_class(str(root))
    if isinstance(model, nn.Module):
        built = _given(model, root, dtype, stored, log)
    elif isinstance(model, type) and is_diffusers(model):
        # from_pretrained constructs a model in the dtype that it is to have: buffers depend on it.
        with without_weights(_floating(dtype or main)), log, _explained(model.__name__):
            built = Built(construct(model, root), log, dtype, True)
    elif model is None or is_pretrained(model):
        kind, config = _configured(root, model if isinstance(model, type) else None)
        chosen = dtype or _config_dtype(config) or stored or torch.get_default_dtype()
        with without_weights(chosen), log, _explained(kind.__name__):
            made = kind(_with_dtype(config, chosen))
        built = Built(made, log, chosen, True)
    else:
        built = _called(model, root, dtype, stored, log)
    return _dequantised(built, root)


def _dequantised(built: Built, root: str | None) -> Built:
    """With the quantizer that the configuration beside the weights calls for."""
    if not root or not is_pretrained(built.model) or not (Path(root) / "config.json").is_file():
        return built
    quantization = _read_config(root).get("quantization_config")
    if quantization is None:
        return built
    quantizer = dequantizer(quantization, root)
    prepare(quantizer, built.model, built.dtype or torch.get_default_dtype())
    return replace(built, quantizer=quantizer)


def require(model: ModelLike, root: str | None) -> None:
    """Import the model's library and class, where the source names them."""
    if model is None and names_diffusers(root):
        named_class(str(root))
    elif model is None or (isinstance(model, type) and is_pretrained(model)):
        _configured(root, model)


def _called(
    make: type[nn.Module] | Callable[[], nn.Module],
    root: str | None,
    dtype: torch.dtype | None,
    stored: torch.dtype | None,
    log: OperatorLog,
) -> Built:
    """A class, or a callable that builds the model."""
    name = getattr(make, "__name__", repr(make))
    loader: Any = make
    with without_weights(torch.get_default_dtype()), log, _explained(name):
        made = loader()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model={name} gave a {type(made).__name__}, and not a torch.nn.Module")
    if is_pretrained(made):
        return Built(made, log, dtype or _config_dtype(made.config) or stored, True)
    return Built(made, log, dtype, True)


def _given(
    model: nn.Module,
    root: str | None,
    dtype: torch.dtype | None,
    stored: torch.dtype | None,
    log: OperatorLog,
) -> Built:
    """A module that the caller built; its parameters must be on meta, or they would be paid for twice."""
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ConfigError(
            f"model has {len(real)} parameters that are not on the meta device ({real[0]}, ...). Build it "
            "inside `with torch.device('meta'):`, or pass the class or a callable that builds it"
        )
    if is_pretrained(model):
        named = _read_config(root) if root and (Path(root) / "config.json").is_file() else {}
        chosen = dtype or _named_dtype(named.get("dtype") or named.get("torch_dtype")) or stored
        return Built(model, log, chosen, False)
    return Built(model, log, dtype, False)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say what went wrong when a constructor cannot run without data."""
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except Exception as error:
        raise BuildError(
            f"{name} cannot be built on the meta device: {type(error).__name__}: {error}. Its constructor "
            "may need the values of tensors; build it yourself with parameters on meta and pass the module"
        ) from error


def _configured(root: str | None, kind: type[nn.Module] | None) -> tuple[type[nn.Module], Any]:
    """The transformers class and configuration of a checkpoint directory."""
    import transformers

    _read_config(root)
    # A class takes its own configuration, which may be a part of the checkpoint's, as from_pretrained does.
    reader = getattr(kind, "config_class", None) or transformers.AutoConfig
    try:
        config = reader.from_pretrained(root)
    except (ValueError, KeyError, OSError) as error:
        raise BuildError(f"{root}/config.json names no model that transformers knows: {error}") from error
    # The model is built as if it were not quantised, since it is dequantised on the way.
    config.__dict__.pop("quantization_config", None)
    if kind is not None:
        return kind, config
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found, config
    mapping = transformers.MODEL_MAPPING
    if type(config) in mapping:
        return mapping[type(config)], config
    raise BuildError(
        f"{root}/config.json names the architecture {config.architectures}, which transformers "
        f"{transformers.__version__} does not have; pass model= with the class or a callable that builds it"
    )


def _read_config(root: str | None) -> dict[str, Any]:
    path = Path(root) / "config.json" if root else None
    if path is None or not path.is_file():
        raise BuildError(
            f"there is no config.json in {root}; pass model= with the class or a callable that builds it"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BuildError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BuildError(f"{path} does not hold an object")
    return raw


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    """``dtype`` where torch can compute in it, else the default."""
    return dtype if dtype is not None and dtype.itemsize > 1 else torch.get_default_dtype()


def _config_dtype(config: Any) -> torch.dtype | None:
    return _named_dtype(getattr(config, "dtype", None))


def _named_dtype(value: Any) -> torch.dtype | None:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    return found if isinstance(found, torch.dtype) else None


def _with_dtype(config: Any, dtype: torch.dtype) -> Any:
    """The configuration says what the weights are, as after ``from_pretrained``; sub-configurations too."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", {}):
        sub = getattr(config, name, None)
        if sub is not None:
            sub.dtype = dtype
    return config
