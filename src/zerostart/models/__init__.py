"""Models without their weights: built on meta, every tensor's origin settled before anything is sharded."""

from zerostart.models.aliases import Alias, Aliases
from zerostart.models.build import Built, ModelLike, build, require
from zerostart.models.diffusion import finish_diffusers
from zerostart.models.initialise import Program, fill_missing
from zerostart.models.origins import Origins, resolve_origins, tie_names
from zerostart.models.pretrained import finish_pretrained
from zerostart.models.tensors import expectations, let_cast, replace_tensor, set_dtypes, state_names
from zerostart.upstream.diffusers import is_diffusers
from zerostart.upstream.transformers import is_pretrained

__all__ = [
    "Alias",
    "Aliases",
    "Built",
    "ModelLike",
    "Program",
    "Origins",
    "build",
    "expectations",
    "fill_missing",
    "finish_diffusers",
    "finish_pretrained",
    "resolve_origins",
    "is_diffusers",
    "is_pretrained",
    "let_cast",
    "replace_tensor",
    "require",
    "set_dtypes",
    "state_names",
    "tie_names",
]
