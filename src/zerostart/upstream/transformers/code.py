"""Code that lies beside a checkpoint (transformers' ``auto_map``): run only where the caller has said so."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from zerostart.upstream.guard import Use, misfit
from zerostart.upstream.patches import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MODULE = "transformers.dynamic_module_utils"
_SECONDS = Use(
    _MODULE,
    "TIME_OUT_REMOTE_CODE, resolve_trust_remote_code(trust_remote_code)",
    "code of a checkpoint is refused where a question on the terminal would ask whether to run it",
)
TOUCHED = (
    _SECONDS,
    Use(_MODULE, "get_class_from_dynamic_module", "the class of a model in the code beside its checkpoint"),
)


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Inside, transformers refuses code of a checkpoint where it would ask on the terminal whether to run it.

    That is what it does itself where the time to answer is set to nothing. A script that is fed from a pipe
    has no user to ask, and a ``y`` that is meant for something else is no consent.
    """
    if misfit((_SECONDS,)):
        yield
        return
    # Imported here: else it would ask where nothing of transformers has been used before.
    module = importlib.import_module(_MODULE)
    with replaced(module, "TIME_OUT_REMOTE_CODE", 0):
        yield


def class_beside(config: PreTrainedConfig, root: str) -> type | None:
    """The class of the model in the code in ``root``, as its configuration names it; this runs the code.

    None where the configuration names none. Only for a caller who trusts the checkpoint.
    """
    named = getattr(config, "auto_map", None)
    if not isinstance(named, dict):
        return None
    wanted = list(getattr(config, "architectures", None) or ())
    classes = {key: value for key, value in named.items() if key.startswith("AutoModel")}
    fitting = [v for v in classes.values() if isinstance(v, str) and v.rpartition(".")[2] in wanted]
    reference = next(iter(fitting or [v for v in classes.values() if isinstance(v, str)]), None)
    if reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    found = get_class_from_dynamic_module(reference, root)
    return found if isinstance(found, type) else None


@contextlib.contextmanager
def without_bars(library: Literal["transformers", "diffusers"]) -> Iterator[None]:
    """Hide the progress bars of ``library``."""
    logging = importlib.import_module(f"{library}.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
