"""A pytest plugin for transformers' own tests: on CPU, with tiny local models, zerostart enabled or not.

``ZEROSTART_SUITE`` is ``ours`` or ``stock``. The tests ask for an accelerator, though what they test of
loading does not; and they load small models of the hub by name, which are made in a hub cache of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

#: Models of the hub that the tests name, as (model type, configuration).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "patrickvonplaten/t5-tiny-random": (
        "t5",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 64},
    ),
    "sshleifer/tiny-gpt2": (
        "gpt2",
        {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": 64},
    ),
    "hf-internal-testing/tiny-random-gptj": (
        "gptj",
        {
            "n_embd": 16,
            "n_head": 2,
            "n_layer": 2,
            "n_positions": 32,
            "rotary_dim": 4,
            "vocab_size": 64,
        },
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported: what they decide at import must already hold."""
    from transformers import testing_utils

    def wanted(test: Any) -> Any:
        return test

    testing_utils.require_torch_accelerator = wanted
    cache = Path(os.environ["HF_HOME"], "hub")
    for name, (kind, settings) in MODELS.items():
        _provide(cache, name, kind, settings)
    if os.environ["ZEROSTART_SUITE"] == "ours":
        import zerostart

        zerostart.enable(progress=False)


def _provide(cache: Path, name: str, kind: str, settings: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    folder = cache / f"models--{name.replace('/', '--')}"
    if folder.exists():
        return
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    maker = AutoModel if kind == "t5" else AutoModelForCausalLM
    maker.from_config(config).save_pretrained(folder / "snapshots" / "0")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
