"""Rows of small models in DiffSynth's tables of those that it knows: data, and no change of its code."""

import json
import os
from pathlib import Path
from types import ModuleType


def append_rows(table: ModuleType) -> None:
    """Append those of ``ZEROSTART_ROWS`` to the module ``diffsynth.configs.model_configs``.

    Their modules are kept in memory as those of the class that each is ``like``.
    """
    from diffsynth.configs.vram_management_module_maps import VRAM_MANAGEMENT_MODULE_MAPS as maps

    rows = json.loads(Path(os.environ["ZEROSTART_ROWS"]).read_text())
    table.MODEL_CONFIGS.extend(rows)
    maps.update({row["model_class"]: maps[row["like"]] for row in rows if row["like"] in maps})
