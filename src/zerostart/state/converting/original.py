"""The layout of a model's release: names and shapes as its library's ``save_pretrained`` puts them back."""

from __future__ import annotations

from pathlib import Path

from zerostart.errors import ConfigError
from zerostart.models import ModelLibrary
from zerostart.recipe import SymbolicTensor, one_thread
from zerostart.recipe.dtypes import spelling
from zerostart.state.converting.contents import Contents, Stored
from zerostart.state.converting.hugging_face import safetensors_files
from zerostart.state.converting.models import built_model
from zerostart.state.converting.targets import Options, Target, TargetFormat


class Original(TargetFormat):
    """A Hugging Face directory in which conversions of the model's library have been taken back.

    Experts that a training has fused are one tensor each again.
    """

    name = "original"
    indexed = True

    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """Weights as the library's own way back lays them out, which is run on symbols instead of values.

        Raises ConfigError for a model whose library knows no way back.
        """
        built, recipes = built_model(contents)
        if type(built.library).revert is ModelLibrary.revert:
            raise ConfigError(
                f"{type(built.model).__name__} is of {built.library.name}, which has no way back to the "
                "layout of a release: convert to hf, which keeps the names that the source has"
            )
        with one_thread():
            symbols = {
                name: SymbolicTensor.filled(recipe.pieces, recipe.target.shape, recipe.target.dtype)
                for name, recipe in recipes.by_name.items()
            }
            made = built.library.revert(built.model, dict(symbols))
            weights = {}
            for name, tensor in made.items():
                if not isinstance(tensor, SymbolicTensor):
                    raise ConfigError(f"the way back of {built.library.name} gives values for {name}")
                value = tensor.value
                shape = tuple(tensor.shape)
                weights[name] = Stored(name, spelling(tensor.dtype, name), shape, value.pieces)
        return safetensors_files(contents, weights, options)
