"""transformers' conversions, out of a table in which no pattern is compiled that nobody asks for."""

from __future__ import annotations

import re

import torch

from zerostart.upstream import patches
from zerostart.upstream.transformers import registered_conversions


def test_conversions_are_the_librarys_own_and_nothing_stays() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, conversion_mapping, core_model_loading

    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, num_experts=2, vocab_size=8))
    before = conversion_mapping._checkpoint_conversion_mapping_cache
    conversion_mapping._checkpoint_conversion_mapping_cache = None
    try:
        found = registered_conversions(model)
        assert conversion_mapping._checkpoint_conversion_mapping_cache is None
        assert core_model_loading.re is re
        assert not [point for point in patches.active() if "mapping" in point.owner or "core" in point.owner]
        expected = conversion_mapping.get_model_conversion_mapping(model)
        assert found
        assert [type(one) for one in found] == [type(one) for one in expected]
        for ours, its in zip(found, expected, strict=True):
            assert isinstance(ours.compiled_sources, re.Pattern)
            assert ours.compiled_sources == its.compiled_sources
            assert (ours.source_patterns, ours.target_patterns) == (its.source_patterns, its.target_patterns)
        made = conversion_mapping._checkpoint_conversion_mapping_cache
        again = registered_conversions(model)  # with the library's own table
        assert conversion_mapping._checkpoint_conversion_mapping_cache is made
        assert [one.compiled_sources for one in again] == [one.compiled_sources for one in expected]
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache = before
