"""Language models of transformers: the next token, or tokens that are hidden."""

from __future__ import annotations

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.errors import CheckpointError, ConfigError, ReadError
from zerostart.training.config.sections import TaskConfig
from zerostart.training.loop.task import Batch, Collator, Items, Task
from zerostart.training.tasks.text import Sequences, file_digests, iter_documents, split_held_out, tokenize

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from zerostart.distributed.world import World
    from zerostart.training.config.configuration import DataConfig, TrainConfig


#: The label that the loss of transformers' models leaves out.
IGNORED_LABEL = -100
_TOKENIZER_FILES = ("tokenizer_config.json", "config.json")
_REMOTE = (
    "{directory}: the {what} is made by code that lies in the checkpoint, and nobody has asked for that "
    "to be run. Read "
    "it, and set model.trust_remote_code=true; or name files that need none"
)


class LanguageConfig(TaskConfig):
    """The next token."""


class MaskedConfig(TaskConfig):
    """Tokens that are hidden."""

    mask_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Probability of a token to be hidden."""


class _Language(Task):
    """What both have in common. ``unpredicted``: the first tokens of a sequence that have no prediction."""

    sections: ClassVar[frozenset[str]] = frozenset({"data"})
    needs: ClassVar[frozenset[str]] = frozenset({"data"})
    whole_steps: ClassVar[bool] = False  # sequences of all lengths go together
    examples: ClassVar[str] = "sequences"
    counted: ClassVar[tuple[str, str]] = ("tokens", "tok/s")
    weightless: ClassVar[str] = (
        "the held-out sequences give no token to predict, so they have no loss; raise data.held_out or name "
        "more text"
    )
    unpredicted: ClassVar[int]
    settings: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._options: dict[str, Any] = {}  # further arguments of the forward
        self._longest = 0  # tokens of a sequence

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise ValueError for what is of a pipeline, which no language model is loaded from or saved in."""
        told = {"model.component": config.model.component, "output.pipeline": config.output.pipeline or None}
        for key in (key for key, value in told.items() if value is not None):
            raise ValueError(f"{key} is for pipelines of diffusers, not for task.name {config.task.name}")

    @property
    def _data(self) -> DataConfig:
        assert self.config.data is not None, "needed, as the configuration has found out"
        return self.config.data

    def open(self) -> None:
        """Read the model's configuration and the tokenizer.

        Raises :class:`CheckpointNotFoundError`, :class:`CheckpointError` or :class:`ConfigError` where one is
        not there, or they do not go together.
        """
        trusted = self.config.model.trust_remote_code
        self.settings = _read_settings(self.config.model.source, trusted)
        self.tokenizer = _load_tokenizer(self._data.tokenizer or self.config.model.source, trusted)
        size = self.settings.get_text_config().vocab_size
        # The other way round is usual: tables of embeddings are rounded up to a multiple.
        if len(self.tokenizer) > size:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens, but the model only {size}; use the "
                "model's tokenizer"
            )

    def facts(self) -> dict[str, str]:
        """The model's configuration but for its path, and the tokenizer."""
        described = {**self.settings.to_dict(), "_name_or_path": None}
        special = (self.tokenizer.pad_token_id, self.tokenizer.mask_token_id, self.tokenizer.all_special_ids)
        return {
            "the model's config.json": _short(repr(sorted(described.items()))),
            "the tokenizer": _short(repr((sorted(self.tokenizer.get_vocab().items()), special))),
        }

    @property
    def hidden_size(self) -> int | None:
        """As the configuration of the model says."""
        size: int | None = getattr(self.settings, "hidden_size", None)
        return size

    def items(self, world: World) -> Sequences:
        """The sequences of ``data``. Raises :class:`ConfigError`."""
        found = tokenize(iter_documents(self._data), self.tokenizer, self._data)
        # For the model, which is built later: it has to have as many positions.
        self._longest = found.longest
        return found

    def split(self, items: Items) -> tuple[Items, Items | None]:
        """By ``data.held_out``. Raises :class:`ConfigError` where none are left to train on."""
        assert isinstance(items, Sequences)
        return split_held_out(items, self._data.held_out)

    def described(self, items: Items) -> str:
        """Sequences and tokens."""
        assert isinstance(items, Sequences)
        return f"{len(items):,} sequences of {items.tokens.numel():,} tokens"

    def files(self) -> dict[str, str]:
        """Those of ``data.source``. Raises :class:`ConfigError`."""
        return file_digests(self._data)

    @abstractmethod
    def automatic(self) -> Any:
        """transformers' automatic class of the models that do this."""

    def builder(self) -> Callable[[], nn.Module]:
        """A callable that builds the model class.

        It raises :class:`ConfigError` when models of this type have no head for the task, or positions for
        fewer tokens than a sequence has.
        """

        def build() -> nn.Module:
            try:
                model: nn.Module = self.automatic().from_config(
                    self.settings, trust_remote_code=self.config.model.trust_remote_code
                )
            except ValueError as error:
                message = f"task {self.config.task.name} has no model of type {self.settings.model_type}"
                raise ConfigError(f"{message}: {error}") from error
            check_positions(model, self.settings.get_text_config(), self._longest, "data.sequence_length")
            return model

        return build

    def begin(self, model: nn.Module) -> None:
        """A causal model would fill a cache for generation that nobody reads."""
        if "use_cache" in inspect.signature(model.forward).parameters:
            self._options = {"use_cache": False}

    def predicted_tokens(self, labels: torch.Tensor) -> int:
        """How many labels ([batch, length]) the loss of a batch is the mean of."""
        return int((labels[:, self.unpredicted :] != IGNORED_LABEL).sum())

    def weighed(self, batch: Batch) -> tuple[Batch, int]:
        """``batch``, and how many tokens it predicts.

        Loss and gradients of a step are means over the predicted tokens of all its batches on all ranks (what
        transformers calls ``num_items_in_batch``), and a batch counts for as many as it has. Where it has
        none its own mean would be 0 / 0, which spoils a sum even with weight 0; then one label is filled in.
        """
        labels: torch.Tensor = batch["labels"]
        predicted = self.predicted_tokens(labels)
        if predicted == 0:
            labels, column = labels.clone(), self.unpredicted
            labels[0, column] = batch["input_ids"][0, column]
        return {**batch, "labels": labels}, predicted

    def seen(self, batch: Batch) -> int:
        """Tokens, padding aside."""
        return int(batch["attention_mask"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """By the model's own loss function."""
        if "shift_labels" in batch:  # of a shared sequence, where no rank could make the whole mask
            batch = {key: value for key, value in batch.items() if key != "attention_mask"}
        loss: torch.Tensor = model(**batch, **self._options).loss
        return loss

    def beside(self, folder: Path) -> None:
        """The tokenizer."""
        self.tokenizer.save_pretrained(folder)


class CausalLanguage(_Language):
    """The next token."""

    Settings: ClassVar[type[TaskConfig]] = LanguageConfig
    shares_sequences: ClassVar[bool] = True  # whose tokens look back alone
    # A causal model predicts each token from those before it, so the first has no prediction.
    unpredicted: ClassVar[int] = 1

    def automatic(self) -> Any:
        """Models with a head for the next token."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def collator(self, seed: int) -> Collator:
        """``input_ids``, ``attention_mask`` and ``labels``, each [batch, length]; nothing is drawn."""
        padding = self.tokenizer.pad_token_id
        return lambda items: _collate_causal(items, 0 if padding is None else padding)


class MaskedLanguage(_Language):
    """Tokens that are hidden."""

    Settings: ClassVar[type[TaskConfig]] = MaskedConfig
    unpredicted: ClassVar[int] = 0

    def automatic(self) -> Any:
        """Models with a head for hidden tokens."""
        from transformers import AutoModelForMaskedLM

        return AutoModelForMaskedLM

    def collator(self, seed: int) -> Collator:
        """``input_ids``, ``attention_mask`` and ``labels``, each [batch, length].

        ``seed`` fixes which tokens are hidden. Raises :class:`ConfigError` when the tokenizer has no mask
        token.
        """
        from transformers import DataCollatorForLanguageModeling

        task = self.config.task
        assert isinstance(task, MaskedConfig)
        if self.tokenizer.mask_token is None:
            raise ConfigError(
                "task masked-lm needs a tokenizer with a mask token; name one in data.tokenizer"
            )
        collator = DataCollatorForLanguageModeling(
            self.tokenizer, mlm=True, mlm_probability=task.mask_probability
        )
        # Not its argument `seed`: that refuses to work in a process that multiprocessing has started.
        collator.generator = collator.get_generator(seed)
        collate: Collator = collator
        return collate


def _collate_causal(items: Sequence[dict[str, torch.Tensor]], padding: int) -> Batch:
    """Pad on the right. Not transformers' collator: it takes the padding token out of the labels by its id,
    which is the end-of-text token in many models, and that one has to be learnt."""
    length = max(2, *(len(item["input_ids"]) for item in items))  # room for `weighed` to predict something
    shape = (len(items), length)
    input_ids = torch.full(shape, padding, device="cpu")
    labels = torch.full(shape, IGNORED_LABEL, device="cpu")
    attention_mask = torch.zeros(shape, dtype=torch.int64, device="cpu")
    for row, item in enumerate(items):
        tokens = item["input_ids"]
        input_ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _read_settings(source: str, trusted: bool) -> PretrainedConfig:
    """The checkpoint's own configuration, a transformers ``PretrainedConfig``.

    Raises :class:`CheckpointNotFoundError` or :class:`CheckpointError` when there is none to read.
    """
    from transformers import AutoConfig

    directory = _directory_of(source)
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        if not trusted and _runs_code(directory / "config.json"):
            raise ConfigError(_REMOTE.format(directory=directory, what="model")) from error
        raise CheckpointError(f"{directory}: not a readable model configuration: {error}") from error


def _load_tokenizer(source: str, trusted: bool) -> PreTrainedTokenizerBase:
    """The transformers tokenizer there.

    Raises :class:`CheckpointNotFoundError` or :class:`ConfigError` when there is none.
    """
    from transformers import AutoTokenizer

    directory = _directory_of(source)
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        if not trusted and any(map(_runs_code, (directory / name for name in _TOKENIZER_FILES))):
            raise ConfigError(_REMOTE.format(directory=directory, what="tokenizer")) from error
        raise ConfigError(
            f"no tokenizer in {directory} (data.tokenizer can name another): {error}"
        ) from error


def _runs_code(path: Path) -> bool:
    """Whether a configuration names a class whose code is another file of the checkpoint."""
    try:
        return bool(read_json(path, "configuration").get("auto_map"))
    except (CheckpointError, ReadError):
        return False


def _directory_of(source: str) -> Path:
    """Where the files beside the weights are: a directory, that of a file, or an id's cached snapshot."""
    path = resolve_source(source)
    return path.parent if path.is_file() else path


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


#: Parts of what architectures call their tables; OPT's and BART's have rows before the first position.
_NAMES = ("pos", "wpe")
_BEFORE = 2


def check_positions(model: nn.Module, config: PretrainedConfig, longest: int, key: str) -> None:
    """Raise ConfigError where ``longest`` tokens are more than ``model`` has positions for.

    Beyond the last row of a table of positions (BERT, GPT-2) a CPU raises an error of sizes in the forward
    and an accelerator an assertion that ends the process.
    ``config`` is its transformers configuration; ``key`` is where the length is set.
    """
    table = position_table(model, config)
    if table is not None and longest > table[1]:
        name, rows = table
        raise ConfigError(
            f"sequences have up to {longest} tokens, but {type(model).__name__} has positions for {rows} "
            f"({name}; max_position_embeddings is {config.max_position_embeddings}); set {key} to {rows} or "
            "less"
        )


def position_table(model: nn.Module, config: PretrainedConfig) -> tuple[str, int] | None:
    """The name of the table of positions in ``model``, and for how many tokens it is; None: there is none.

    Rotary and relative positions are calculated and end nowhere.
    """
    most = getattr(config, "max_position_embeddings", None)
    # TAPAS counts from 0 in each cell of what it reads, and takes the last row for all tokens beyond.
    if not isinstance(most, int) or getattr(config, "reset_position_index_per_cell", False):
        return None
    ahead = 1 if getattr(config, "ngram", 0) else 0  # ProphetNet's streams are at the token to come
    # Others, of relative positions or of pictures, have another length.
    # By length, since nothing else says that a table is of positions.
    own = [table for table in _tables(model) if 0 <= table[1] - most <= _BEFORE]
    found = [(name, min(rows, most) - padding - ahead) for name, rows, padding in own]
    # The shortest decides, where encoder and decoder have one each.
    return min(found, key=lambda table: table[1], default=None)


def _tables(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Tables by name: their rows, and how many no token is at, as those up to padding's are."""
    for name, module in model.named_modules():
        if hasattr(module, "padding_idx"):  # torch's table, or I-BERT's own
            if _named(name):
                padding = -1 if module.padding_idx is None else module.padding_idx
                # Where padding has a row, positions begin behind it.
                yield name, len(module.weight), padding + 1
            continue
        for key, tensor in module.named_buffers(recurse=False):
            if _named(key) and tensor.dim() == 2:
                yield f"{name}.{key}", tensor.shape[0], 0


def _named(name: str) -> bool:
    last = name.rpartition(".")[2]
    return any(part in last for part in _NAMES)
