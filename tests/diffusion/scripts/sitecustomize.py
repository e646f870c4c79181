"""What a process of DiffSynth's scripts is given before it begins: data, and what its machine lacks.

Rows for small models in DiffSynth's table; names of torchvision's operators, where its library is not made
for the torch that is installed; and without zerostart, a backend for ranks without accelerators.
"""

import os
from types import ModuleType

from tests.diffusion.script_memory import watch
from tests.diffusion.script_precision import PATCHED, in_fp32
from tests.diffusion.script_rows import append_rows
from zerostart.upstream.patches import when_imported


def _declare(module: ModuleType) -> None:
    from tests.diffusion.oracle import declare_operators

    declare_operators()


def _rehearse(module: ModuleType) -> None:
    from tests.integrations.launching import REHEARSAL

    exec(REHEARSAL)


if "ZEROSTART_ROWS" in os.environ:
    watch()
    when_imported("torch", _declare)
    when_imported("diffsynth.configs.model_configs", append_rows)
    if "ZEROSTART_FP32" in os.environ:
        for name in PATCHED:
            when_imported(name, in_fp32)
    if "ZEROSTART_REHEARSAL" in os.environ:
        when_imported("accelerate", _rehearse)
