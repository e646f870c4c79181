"""The arguments of a load, of ``enabled`` and of a forecast: each is described here, once.

The verbs of the front door spell them out in their signatures, which ``tests/contract`` holds equal to these
fields; all else goes by the fields: what a verb hands on, the options of the command line, the defaults of a
training configuration. What the arguments mean is told here; ``documented`` puts it into what ``help`` and
the reference show of the verbs.

What is given to a verb is held against its signature (``checked_arguments``): of the kinds that it names, or
refused, so that no verb goes on with a 2.0 or a "no" until something else fails, or nothing does. What may be
given by name or by path (a dtype, a configuration) is read here.

Imports nothing that is heavy, for the command line.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from zerostart.errors import ConfigError, ZerostartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from zerostart.checkpoint.source import Files
    from zerostart.models import ModelLike as ModelLike

    Source: TypeAlias = str | os.PathLike[str] | Files | Mapping[str, torch.Tensor] | None
    Converter: TypeAlias = (
        Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | Sequence[object] | None
    )
    EngineConfig: TypeAlias = Mapping[str, object] | str | os.PathLike[str]
    import torch

Value = TypeVar("Value")
Verb = TypeVar("Verb", bound="Callable[..., object]")


def _argument(default: Value, help: str = "", *, planned: bool = True) -> Value:
    """A field, in a few words for a command's ``--help``; without any, no command has an option for it.

    ``plan`` takes it if it is ``planned``.
    """
    return field(default=default, metadata={"help": help, "planned": planned})


@dataclass(frozen=True, kw_only=True)
class EnabledArguments:
    """The arguments of ``zerostart.enabled``.

    Attributes:
        engine: None for the active configuration's, ``"deepspeed"`` or ``"fsdp2"``.
        engine_config: with ``engine``, as in ``load``, in the place of the active configuration's.
        zero_stage: with ``engine``, as in ``load``; None for the configuration's own, or 3.
        expert_parallel: as in ``load``, and so are the arguments that follow.
    """

    engine: str | None = _argument(None, "deepspeed or fsdp2; default: what the script is set up for.")
    zero_stage: int | None = _argument(
        None,
        "With --engine, 3 shards parameters, 0 to 2 leave them whole.",
    )
    engine_config: EngineConfig | None = _argument(  # noqa: RUF009  # it makes a field
        None, "A JSON file: DeepSpeed's configuration, or the settings of FSDP2."
    )
    expert_parallel: int = _argument(1, "Ranks that share experts.")
    tensor_parallel: int = _argument(1, "Ranks that share a tensor.")
    sequence_parallel: int = _argument(1, "Ranks that share each sequence.")
    memory_limit: int | None = _argument(None, "Most staging buffers of a rank.")
    chunk_size: int | None = _argument(None, "Most bytes of one read.")
    progress: bool = _argument(True, planned=False)
    fp32_masters: bool = _argument(True, planned=False)


@dataclass(frozen=True, kw_only=True)
class LoadArguments(EnabledArguments):
    """The arguments of ``zerostart.load``.

    Attributes:
        source: a directory, a ``.safetensors`` file, a file of ``torch.save`` (weights are read as data, no
            code in it is run), a directory that DeepSpeed, ``torch.distributed.checkpoint`` or accelerate
            saved while training, a hub id (fetched where the local cache has it not), the URL of a file or a
            directory (``docs/stores.md``), or a mapping of name to tensor. Of a diffusers pipeline it is the
            component of the class of ``model``. A file with no configuration and a mapping need ``model``; a
            mapping is held by every rank or, with the others passing None, by one, and must not change during
            the load. None on every rank: there is no checkpoint, see ``docs/starting.md``.
        model: a module on the meta device, a class, or a callable that builds one; without it, the class that
            the checkpoint's configuration names. Without a source a configuration too, initialised as the
            unsharded model from the same seed; or a module with values, which is sharded itself, rank 0's
            values where ranks differ.
        engine: ``"deepspeed"`` or ``"fsdp2"``; None for the one that ``accelerate launch`` has set up, else
            DeepSpeed where it is installed, else FSDP2; the report says which it is, and why.
        zero_stage: 3 shards parameters. At 1 and 2 on DeepSpeed, and at 0, they are whole on every rank:
            views into a flat buffer, which DeepSpeed's optimizer takes as its own, in the dtype to which
            DeepSpeed casts them; 0 on FSDP2 is for DistributedDataParallel. At 1 and 2 FSDP2 shards them at
            rest, and gathers them less often. See ``docs/zero12.md``.
        engine_config: a mapping, or the path of a JSON file that holds it. For DeepSpeed its configuration;
            for FSDP2 keyword arguments of ``fully_shard`` (``mesh``, ``reshard_after_forward``,
            ``shard_placement_fn``, ``mp_policy``, ``offload_policy``), ``replicate``, the number of replicas
            (HSDP), and ``wrap``, the units: classes, their names, or names of modules such as
            ``model.layers.*``. For both, ``ep_plan`` and ``tp_plan`` in the place of the plans that the model
            declares. See ``docs/placements.md``.
        expert_parallel: ranks that share the experts of a mixture: each holds its own alone, and tokens
            travel to them. Divides the number of ranks; where tensors are shared too, ``docs/parallelism.md``
            says how the two go together.
        tensor_parallel: ranks that share tensors and see one batch: by the model's tensor-parallel plan, or
            on DeepSpeed as its section ``tensor_parallel`` says, whose ``autotp_size`` counts where this is
            1. Divides the number of ranks. See ``docs/parallelism.md``.
        sequence_parallel: ranks that share each sequence of a batch: attention heads travel between them
            (DeepSpeed's Ulysses, stages 1 to 3) or keys and values do (context parallelism, FSDP2). It cuts
            no parameter. Divides the number of ranks; see ``docs/parallelism.md``.
        dtype: floating dtype of the model, or its name (``"bfloat16"``); None keeps the checkpoint's own (its
            configuration's, else the stored one), or the one that ``engine_config`` asks for.
        converter: None for the conversions that transformers or diffusers registers for the model, a callable
            from state dict to state dict, or a list of transformers conversions.
        memory_limit: most bytes of staging buffers on this rank.
        chunk_size: most bytes of one read.
        strict: raise on missing, unexpected and mismatched tensors before weights are read; if False,
            initialise what is missing, ignore what is unexpected, and still raise on a mismatch.
        progress: show a progress bar on rank 0 where a terminal is attached.
        fp32_masters: where parameters hold less than the checkpoint stores (bf16 from fp32), have fp32 master
            weights start from the stored values and not from their rounding. With DeepSpeed the masters are
            read when ``deepspeed.initialize`` makes them, so that the source must still be there, unchanged
            (a mapping too, which is not kept alive for it). With FSDP2 and an ``mp_policy`` that computes in
            ``dtype``, the sharded parameters are the masters, and are held in fp32.
        exchange: whether bytes that several ranks want (replicas, columns of one matrix, at stages 1 and 2
            all) are read by one of them and sent to the others. None takes what is estimated to be faster,
            which the report tells; at stages 1 and 2 an exchange on accelerators, and reading on the CPU,
            where a message costs more than the page cache.
        trust_remote_code: run the code that lies beside the checkpoint (transformers' ``auto_map``), where
            the model's class is there. Without it none is run, and nobody is asked.
    """

    source: Source = field(kw_only=False)
    model: ModelLike = None
    engine: str | None = _argument(
        None,
        "deepspeed or fsdp2; default: the launcher's, else the one that is installed.",
    )
    zero_stage: int = _argument(3, "ZeRO stage; 0: whole on every rank.")
    dtype: torch.dtype | str | None = _argument(  # noqa: RUF009  # it makes a field
        None, "Floating dtype, such as bfloat16; default: the checkpoint's own."
    )
    converter: Converter = None
    strict: bool = _argument(True, planned=False)
    exchange: bool | None = _argument(
        None,
        "Read what several ranks want once and exchange it, or on each; default: what is faster.",
    )
    trust_remote_code: bool = _argument(False, "Run the code of the model that lies beside the checkpoint.")


@dataclass(frozen=True, kw_only=True)
class ForecastArguments:
    """The arguments of a forecast beside those of a load; see ``zerostart.plan``.

    Attributes:
        device_memory: bytes of one accelerator; given, ranks compute on accelerators wherever the plan is
            made. Without it and ``host_memory``, the limits of a job of up to eight ranks are this machine's.
        host_memory: bytes of one machine, which up to eight ranks share.
        storage_rate: bytes a second that one machine gets from its disk or over its link to storage; None:
            2 GB/s, or no limit for a checkpoint that is in the page cache.
        interconnect_rate: bytes a second that one rank sends or receives; None: 1 GB/s.
        optimizer: ``"adamw"``, ``"adam"``, ``"momentum"`` and ``"sgd"`` are torch's,
            ``"fused_adamw"`` is one in fused kernels; None: the one that a DeepSpeed configuration names,
            else AdamW.
    """

    device_memory: int | None = _argument(
        None,
        "Memory of one accelerator, such as 80GB; plans for accelerators also where there is none.",
    )
    host_memory: int | None = _argument(None, "Memory of one machine, which up to 8 ranks share.")
    storage_rate: float | None = _argument(None, "What storage gives to one machine, such as 7GB/s.")
    interconnect_rate: float | None = _argument(None, "What one rank exchanges with others, such as 200GB/s.")
    optimizer: str | None = _argument(
        None, "adamw, fused_adamw, adam, momentum or sgd; default: as configured, else adamw."
    )


def documented(kind: type) -> Callable[[Verb], Verb]:
    """Decorator: what ``kind`` says of its fields, in the place of a line ``Kind: ...`` of the docstring."""

    def complete(verb: Verb) -> Verb:
        if verb.__doc__ is not None and kind.__doc__ is not None:  # not there under -OO
            told = textwrap.dedent(inspect.cleandoc(kind.__doc__).partition("Attributes:\n")[2])
            verb.__doc__ = re.sub(
                rf"^( *){kind.__name__}: .*$",
                lambda line: textwrap.indent(told, line[1]),
                verb.__doc__,
                flags=re.MULTILINE,
            )
        return verb

    return complete


def options(*kinds: type) -> Iterator[tuple[str, object, str]]:
    """Name, default and words of each argument in ``kinds`` that commands have an option for."""
    for kind in kinds:
        for described in dataclasses.fields(kind):
            if words := described.metadata.get("help"):
                yield described.name, described.default, words


#: By what annotations call them: classes, or where one is that need not be imported, and the words for it.
_KINDS: dict[str, tuple[type | tuple[str, str] | tuple[type, ...], str]] = {
    "None": (type(None), "None"),
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a string"),
    "os.PathLike": (os.PathLike, "a path"),
    "Mapping": (Mapping, "a dictionary"),
    "Sequence": (Collection, "a list"),  # of names, whose order does not matter
    "EngineConfig": ((Mapping, str, os.PathLike), "a dictionary, the path of a JSON file"),
    "torch.dtype": (("torch", "dtype"), "a torch.dtype"),
    "nn.Module": (("torch.nn", "Module"), "a module"),
    "DiffusionPipeline": (("diffusers", "DiffusionPipeline"), "a diffusers pipeline"),
}

#: What to do about a configuration that cannot be read.
_JSON = "give a JSON file; an accelerate configuration (YAML) names DeepSpeed's as deepspeed_config_file"


def check_arguments(
    verb: Callable[..., object], given: Mapping[str, object], collective: bool = True
) -> None:
    """Raise ConfigError for the first of the ``given`` arguments that is not of the kind that ``verb`` names.

    Where all ranks make the call (``collective``), it is raised on all of them. What an annotation calls by
    a name of its own (``Source``) is left to the verb.
    """
    with checked_arguments(verb, given, collective):
        pass


@contextmanager
def checked_arguments(
    verb: Callable[..., object], given: Mapping[str, object], collective: bool = True
) -> Iterator[None]:
    """``check_arguments``; inside, what ``verb`` reads of them may raise, which is told in the same way."""
    try:
        wrong = next(filter(None, (_mistake(name, verb, value) for name, value in given.items())), None)
        if wrong is not None:
            raise ConfigError(wrong)
        yield
    except Exception as mistake:
        # What other libraries raise, too: the ranks that have read their arguments wait for this one.
        error: Exception = mistake
        if isinstance(mistake, ZerostartError):
            # A new one of the same class, as the text of an error is fixed; what caused the first causes this
            # one.
            error = type(mistake)(f"zerostart.{verb.__name__}: {mistake}")
            error.__cause__ = mistake
        # Where the call is not collective nobody waits, and to meet the others would hang this rank.
        if not collective:
            raise error from error.__cause__
        from zerostart.distributed.world import current_world

        with current_world().phase(f"arguments of {verb.__name__}"):
            raise error from error.__cause__


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """``dtype`` itself, or the one of that name. Raises ConfigError for a name that is none."""
    if not isinstance(dtype, str):
        return dtype
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is not a torch dtype; try float32, bfloat16 or float16")
    return found


def config_of(config: Mapping[str, object] | str | os.PathLike[str] | None) -> Mapping[str, object] | None:
    """``config`` itself, or what the JSON file at that path holds.

    Raises ConfigError, which names the file, for one that cannot be read and for one that holds no object.
    """
    if config is None or isinstance(config, Mapping):
        return config
    from zerostart.checkpoint.strict_json import DAMAGED, MAX_CONFIG_BYTES, read_json

    try:
        return read_json(Path(config), "configuration", MAX_CONFIG_BYTES)
    except (ZerostartError, TypeError, ValueError) as error:
        raise ConfigError(f"engine_config: {str(error).replace(DAMAGED, _JSON)}") from error


def _mistake(name: str, verb: Callable[..., object], value: object) -> str | None:
    """What is wrong with ``value``, if anything is."""
    parts = _parts(verb.__annotations__[name])
    if not parts.keys() <= _KINDS.keys() or any(_is(part, value) for part in parts):
        return None
    accepted = " or ".join(_KINDS[part][1] + inner for part, inner in parts.items())
    return f"{name}={reprlib.repr(value)} is not accepted; give {accepted}"


@cache
def _parts(annotation: str) -> dict[str, str]:
    """The alternatives of an annotation, without what stands in brackets; that in words, where it matters."""
    parts, depth, part = dict[str, str](), 0, ""
    # Cut at each bar that stands in no bracket; the bar at the end closes the last part.
    for letter in annotation + "|":
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and depth == 0:
            kind, _, inner = part.strip().partition("[")
            parts[kind] = " of strings" if (kind, inner) == ("Sequence", "str]") else ""
            part = ""
        else:
            part += letter
    return parts


def _is(kind: str, value: object) -> bool:
    known = _KINDS[kind][0]
    # A class whose module is not imported has no objects yet.
    found: Any = known
    if isinstance(known, tuple) and isinstance(known[0], str):
        found = getattr(sys.modules.get(known[0]), str(known[1]), None)
    if found is None or (isinstance(value, bool) and kind in ("int", "float")):
        return False
    # A string is a collection of its letters, which nobody means.
    return isinstance(value, found) and not (kind == "Sequence" and isinstance(value, str))
