"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its states.

Source: ``ds_to_universal.py`` and ``universal_checkpoint.py`` in ``deepspeed.checkpoint`` (0.19.8).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerostart.checkpoint.formats.zero import MASTERS
from zerostart.checkpoint.write.images import Image, archived
from zerostart.state.converting.contents import Contents
from zerostart.state.converting.models import ModelForm, as_model, numbers_of, state_keys
from zerostart.state.converting.targets import Options, Target, TargetFormat, others_left_out
from zerostart.state.converting.zero import KEPT, check, model_states, partitioning, tag_of
from zerostart.upstream.deepspeed import checkpoints as deepspeed


class Universal(TargetFormat):
    """What a DeepSpeed engine opens with ``load_universal``, on any number of ranks."""

    name = "universal"

    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """A directory for the step with the folders, and ``latest_universal``, which names it."""
        check(options)
        form = as_model(contents)
        target = Target(left_out=others_left_out(contents))
        target.dequantised, target.settings = form.dequantised, form.settings
        keys, left = state_keys(form)
        target.left_out += left
        tag = f"{tag_of(contents)}_universal"

        def add(name: str, value: object) -> None:
            target.images.append(archived(f"{tag}/{name}", value, scratch))

        parted = partitioning(options).weights
        weights = model_states(form, options, target)
        for rank in range(options.world_size) if parted else [0]:
            prefix = f"zero_pp_rank_{rank}_" if parted else ""
            add(f"{prefix}mp_rank_00_model_states.pt", weights(rank))
        for name in form.trained:
            own = form.contents
            kept = {MASTERS: own.best(name)}
            kept |= {key: own.states[key][name] for key in keys if name in own.states[key]}
            for key, tensor in kept.items():
                add(f"zero/{name}/{key}.pt", {"param": target.room(tensor, KEPT), "cat_dim": 0})
            for key, number in numbers_of(form, [name]).items():
                add(f"zero/{name}/{key}.pt", number)
        add("zero/optimizer_state.pt", _optimizer(form))
        for latest in ("latest", "latest_universal"):
            target.images.append(Image(latest, len(tag), ((0, tag.encode()),)))
        return target


def _optimizer(form: ModelForm) -> dict[str, Any]:
    """What all parameters share: the settings of groups, and the step, for the loaders of all stages."""
    groups: list[dict[str, Any]] = [
        {**group.settings, "params": [number]} for number, group in enumerate(form.groups)
    ]
    state = {number: numbers_of(form, group.parameters) for number, group in enumerate(form.groups)}
    held: dict[str, Any] = {"state": state if any(state.values()) else {}, "param_groups": groups}
    return {
        "zero_stage": deepspeed.stage_of(1),
        "partition_count": [1] * len(groups),
        "ds_version": deepspeed.version(),
        "param_groups": groups,
        "optimizer_state_dict": held,
    }
