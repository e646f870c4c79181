"""A small stand-in for `evaluate`: the share of predictions that are right."""

from __future__ import annotations

from typing import Any

__all__ = ["load"]

__version__ = "99.0.0"


class Accuracy:
    """As ``evaluate.load("accuracy")``, called once."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        right = [a == b for a, b in zip(predictions, references, strict=True)]
        return {"accuracy": float(sum(right) / max(1, len(right)))}


def load(name: str, *_: Any, **__: Any) -> Accuracy:
    assert name == "accuracy", name
    return Accuracy()
