"""A model library of another package, with its own class, configuration, names and layout."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.models import (
    BuildRequest,
    Built,
    Construction,
    Converter,
    ModelLibrary,
    OwnLoading,
    register_model_library,
)
from zerostart.recipe import Recipes

CONFIG = "toy.json"


class ToyModel(nn.Module):
    """Layers whose weights the file has transposed, and a tied head."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.config = {"words": words, "width": width, "layers": layers}
        self.source = ""
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("angles", torch.arange(width) / width, persistent=False)

    def tie(self) -> None:
        """Use one parameter for the embedding and the head."""
        self.head.weight = self.embed.weight

    def initialise(self) -> None:
        """Initialise the parameters that were not read from a file."""
        for parameter in self.parameters():
            if not getattr(parameter, "from_file", False):
                nn.init.normal_(parameter, std=0.02)

    def save(self, root: Path) -> None:
        """Save the model in the library's format."""
        (root / CONFIG).write_text(json.dumps(self.config))
        tensors = {name: t for name, t in self.state_dict().items() if name != "head.weight"}
        save_file(to_file(tensors), root / "toy.safetensors")

    @classmethod
    def read(cls, root: str, dtype: torch.dtype | None = None) -> "ToyModel":
        """Load a model with the library's own code."""
        with torch.device("meta"):
            model = cls(**json.loads(Path(root, CONFIG).read_text()))
        model.to_empty(device="cpu")
        model.angles = torch.arange(model.config["width"]) / model.config["width"]
        for name, tensor in from_file(load_file(Path(root, "toy.safetensors"))).items():
            parameter = model.get_parameter(name)
            parameter.data = tensor.to(dtype or tensor.dtype).contiguous()
            parameter.from_file = True  # type: ignore[attr-defined]
        model.tie()
        model.initialise()
        model.source = root
        return model.eval()


def from_file(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the file's names and layout to the module's."""
    converted = {}
    for name, tensor in state.items():
        if name == "words":
            converted["embed.weight"] = tensor
        else:
            _, number, kind = name.split("/")
            full_name = f"layers.{number}." + {"w": "weight", "b": "bias"}[kind]
            converted[full_name] = tensor.t() if kind == "w" else tensor
    return converted


def to_file(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the module's names and layout to the file's."""
    converted = {}
    for name, tensor in state.items():
        if name == "embed.weight":
            converted["words"] = tensor
        else:
            _, number, kind = name.split(".")
            weight = kind == "weight"
            converted[f"block/{number}/{kind[0]}"] = tensor.t().contiguous() if weight else tensor
    return converted


@register_model_library
class Toy(ModelLibrary):
    """Registration of the toy library with zerostart."""

    name = "toy"

    def handles(self, kind: type) -> bool:
        return issubclass(kind, ToyModel)

    def describes(self, root: str | None) -> bool:
        return root is not None and Path(root, CONFIG).is_file()

    def construction(self, kind: type[nn.Module] | None, request: BuildRequest) -> Construction:
        config = json.loads(Path(request.root or "", CONFIG).read_text())
        dtype = request.dtype or request.first_dtype or torch.float32
        build: Callable[..., nn.Module] = kind or ToyModel
        return Construction("ToyModel", lambda: build(**config), torch.float32, dtype)

    def converter(self, model: nn.Module) -> Converter | None:
        return from_file

    def revert(self, model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return to_file(state_dict)

    def ties(self, model: nn.Module) -> dict[str, str]:
        return {"head.weight": "embed.weight"}

    def mark_loaded(self, tensor: torch.Tensor) -> None:
        tensor.from_file = True  # type: ignore[attr-defined]

    def initialiser(self, model: nn.Module) -> Callable[[], None] | None:
        assert isinstance(model, ToyModel)
        return model.initialise

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        model: Any = built.model
        model.source = name or ""

    def own_loading(self, kind: type[nn.Module]) -> OwnLoading | None:
        return ToyModel.read
