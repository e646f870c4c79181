"""A conversion of one's own in a list of transformers conversions, as the tests of traces run it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from tests.recipe.tracing import trace
from zerostart.checkpoint.memory import memory_catalog
from zerostart.recipe import Recipe, Target

Tensors = dict[str, torch.Tensor]
#: What an operation names its results, in the order of those that are expected.
OUTPUTS = ("out_a", "out_b", "out_c", "out_d")


class _Operation(ConversionOps):
    """The operation that a function is, from the tensors by pattern to those by pattern."""

    supports_many_to_many = True

    def __init__(self, function: Callable[[Tensors], Tensors]) -> None:
        self.function = function

    def convert(self, input_dict: Any, *_: Any, **__: Any) -> Any:
        """Run it."""
        return self.function({name: t[0] if isinstance(t, list) else t for name, t in input_dict.items()})


class _Model(PreTrainedModel):
    """The class that a list of conversions is for; its weights are told by the targets alone."""

    config_class = PretrainedConfig


def convert_with(
    function: Callable[[Tensors], Tensors], sources: Tensors, expected: Mapping[str, torch.Tensor]
) -> dict[str, Recipe]:
    """The recipes of what a list with one operation makes, by the names of ``expected``.

    transformers casts the sources to the dtype of the first result, so one that has theirs comes first.
    """
    dtype = next(iter(sources.values())).dtype
    outputs = dict(
        zip(sorted(expected, key=lambda name: expected[name].dtype != dtype), OUTPUTS, strict=False)
    )
    back = {output: name for name, output in outputs.items()}
    mapping = [
        WeightConverter(
            source_patterns=list(sources),
            target_patterns=list(back),
            operations=[_Operation(lambda given: _named(function, given, outputs))],
        )
    ]
    targets = {
        output: Target(output, tuple(expected[name].shape), expected[name].dtype)
        for output, name in back.items()
    }
    catalog = memory_catalog(sources, (0,))
    found = trace(catalog, _Model(PretrainedConfig()), targets, mapping)
    return {
        name: Recipe(replace(recipe.target, name=name), recipe.pieces, recipe.converted)
        for output, recipe in found.by_name.items()
        if (name := back[output])
    }


def _named(function: Callable[[Tensors], Tensors], given: Tensors, outputs: Mapping[str, str]) -> Tensors:
    """``function``, with its results named as the list has them."""
    made = function(given)
    return {output: made[name] for name, output in outputs.items()}
