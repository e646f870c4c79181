"""Prepare a process of DiffSynth's scripts for this machine.

Add rows for small models to DiffSynth's table; declare torchvision's operators if its library does not fit
the installed torch; and without zerostart, add a backend for ranks without accelerators.
"""

import json
import os
from pathlib import Path
from types import ModuleType

from zerostart.upstream.patches import call_on_import


def _declare(module: ModuleType) -> None:
    from tests.diffusion.oracle import declare_operators

    declare_operators()


def _append_rows(table: ModuleType) -> None:
    """Add the small models, with the memory settings of the class in ``like``."""
    from diffsynth.configs.vram_management_module_maps import VRAM_MANAGEMENT_MODULE_MAPS as maps

    rows = json.loads(Path(os.environ["ZEROSTART_ROWS"]).read_text())
    table.MODEL_CONFIGS.extend(rows)
    maps.update({row["model_class"]: maps[row["like"]] for row in rows if row["like"] in maps})


def _rehearse(module: ModuleType) -> None:
    from tests.integrations.launching import REHEARSAL

    exec(REHEARSAL)


if "ZEROSTART_ROWS" in os.environ:
    call_on_import("torch", _declare)
    call_on_import("diffsynth.configs.model_configs", _append_rows)
    if "ZEROSTART_REHEARSAL" in os.environ:
        call_on_import("accelerate", _rehearse)
