"""Checkpoints with other names than the model's: of a base, a head, or an old release."""

from pathlib import Path

import pytest
import torch

from tests.conformance.checkpoints import choose, save
from tests.conformance.configs import small_config
from tests.conformance.exclusions import excluded
from tests.conformance.registry import identifiers, model_class
from tests.conformance.sharded import compare, reference
from tests.conformance.suite import save_base
from tests.tiny import edit_tensors

#: Types whose base and head checkpoints are exchanged in the ordinary tests. They include overwritten,
#: reordered and discarded draws, an empty parameter, a tie that lacks both names, and a base with a part of
#: the configuration.
SOME = (
    "nomic_bert",
    "qwen3_moe",
    "mixtral",
    "UltraVBertForMaskedLM",
    "Sapiens2ForPoseEstimation",
    "colqwen2",
)
#: Base checkpoints whose configuration is not the head's; the library refuses them too.
NOT_BACK = (
    "Tipsv2DptForDepthEstimation",
    "Tipsv2DptForNormalEstimation",
    "Tipsv2DptForSemanticSegmentation",
    "colqwen2",
    "jev",
    "tipsv2_dpt",
)


def _check_base_and_head(identifier: str, path: Path) -> None:
    """Load a head's checkpoint into the base class, and back."""
    kind, config = choose(identifier)
    head, base = save_base(kind, config, path)
    if base is head:
        return
    differences, _ = compare(type(base), path / "head", reference(type(base), path / "head"), base)
    if identifier not in NOT_BACK:
        back, _ = compare(kind, path / "base", reference(kind, path / "base"), head)
        differences += back
    assert not differences


@pytest.mark.parametrize("identifier", SOME)
def test_base_and_head_of_some(identifier: str, tmp_path: Path) -> None:
    _check_base_and_head(identifier, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("identifier", [name for name in identifiers() if excluded(name) is None])
def test_base_and_head(identifier: str, tmp_path: Path) -> None:
    _check_base_and_head(identifier, tmp_path)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertModel"])
def test_names_of_old_releases(name: str, tmp_path: Path) -> None:
    kind = model_class(name)
    result = _saved_with_old_names(kind, tmp_path)
    expected = reference(kind, tmp_path)
    assert not expected.missing
    assert not expected.unexpected
    differences, tensors = compare(kind, tmp_path, expected, result)
    assert not differences
    assert tensors > 40


def _saved_with_old_names(kind: type | None, path: Path) -> torch.nn.Module:
    result: torch.nn.Module = save(kind, small_config(kind, "bert"), path, torch.float32, shard_size="1GB")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            for new, before in old.items():
                if name.endswith(new):
                    tensors[name.replace(new, before)] = tensors.pop(name)

    edit_tensors(path, rename)
    return result
