"""A rank that does what ``accelerate launch`` has a process do, without the seconds of its imports."""

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.diffusion.oracle import import_diffsynth
from tests.diffusion.script_precision import PATCHED, in_fp32
from tests.diffusion.script_rows import append_rows
from tests.integrations.launching import REHEARSAL

_ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ranked(
    script: str,
    arguments: Sequence[str],
    folder: str,
    config: str,
    processes: int,
    zerostart: bool,
    environment: Mapping[str, str],
) -> None:
    """Run ``script`` in ``folder`` as a rank of a launch with the file ``config``."""
    os.chdir(folder)
    os.environ.update(environment)
    found = _launcher(config, processes)
    os.environ.update(found)
    if "ACCELERATE_USE_DEEPSPEED" not in found:
        for name in _ALONE:
            del os.environ[name]
    import_diffsynth()
    import diffsynth.configs.model_configs as table

    append_rows(table)
    if "ZEROSTART_FP32" in os.environ:
        for name in PATCHED:
            in_fp32(importlib.import_module(name))
    if not hasattr(torch.cpu, "empty_cache"):
        torch.cpu.empty_cache = lambda: None  # which DiffSynth asks for where it moves weights
    if importlib.util.find_spec("librosa") is None:
        sys.path.append(str(Path(__file__).parent / "scripts"))
    if not zerostart:
        exec(REHEARSAL)
        sys.argv[:] = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        return
    from zerostart.cli import main

    try:
        main(["run", script, *arguments])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"the script ended with {end.code}") from end


def _launcher(config: str, processes: int) -> dict[str, str]:
    """The variables that the launcher makes of a configuration file."""
    from accelerate.commands import launch

    options = ["--config_file", config, "--num_processes", str(processes), "--main_process_port", "0"]
    kept: list[Any] = []
    launch.deepspeed_launcher = launch.simple_launcher = kept.append  # the process ends with the script
    launch.launch_command(launch.launch_command_parser().parse_args([*options, "script.py"]))
    (parsed,) = kept
    make = (
        launch.prepare_deepspeed_cmd_env if parsed.use_deepspeed else launch.prepare_simple_launcher_cmd_env
    )
    _, made = make(parsed)
    return {name: value for name, value in made.items() if name.startswith("ACCELERATE")}
