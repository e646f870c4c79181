"""Tasks that train tiny language models, causal and masked."""

import hashlib
import inspect
from pathlib import Path

import torch
from torch.utils.data import Dataset

from zerostart.errors import ConfigError
from zerostart.training import Task, TaskConfig

IGNORED_LABEL = -100


class LanguageConfig(TaskConfig):
    path_keys = frozenset({"source", "tokenizer"})

    source: str
    tokenizer: str | None = None
    sequence_length: int = 512
    packing: bool = True
    held_out: float = 0.0
    mask_probability: float = 0.15


class Sequences(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": torch.tensor(self.rows[index])}

    def digest(self):
        return hashlib.blake2b(repr(self.rows).encode()).hexdigest()

    def shapes(self):
        return [0] * len(self)


class CausalLanguage(Task):
    Settings = LanguageConfig

    def open(self):
        from transformers import AutoConfig, AutoTokenizer

        self.settings = AutoConfig.from_pretrained(self.config.model.source)
        self.tokenizer = AutoTokenizer.from_pretrained(self.config.task.tokenizer or self.config.model.source)
        self.options = {}

    def items(self, world):
        options = self.config.task
        source = Path(options.source)
        files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
        if not all(file.is_file() for file in files) or not files:
            raise ConfigError(f"task.source {source}: no such file")
        texts = [text for file in files for text in self._texts(file)]
        ids = [self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        length = options.sequence_length
        if options.packing:
            end = self.tokenizer.eos_token_id
            flat = [token for row in ids for token in [*row, *([] if end is None else [end])]]
            ids = [flat[at : at + length] for at in range(0, len(flat) - length + 1, length)]
        return Sequences([row[:length] for row in ids if row])

    @staticmethod
    def _texts(file):
        return file.read_text().splitlines() if file.suffix == ".lines" else [file.read_text()]

    def split(self, items):
        fraction = self.config.task.held_out
        if not fraction:
            return items, None
        count = len(items) - max(1, round(len(items) * fraction))
        if count < 1:
            raise ConfigError(f"task.held_out {fraction} leaves none of {len(items)} sequences to train on")
        return Sequences(items.rows[:count]), Sequences(items.rows[count:])

    def automatic(self):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def builder(self):
        return lambda: self.automatic().from_config(self.settings)

    def begin(self, model):
        if "use_cache" in inspect.signature(model.forward).parameters:
            self.options = {"use_cache": False}

    def collator(self, seed):
        return self.collate

    def collate(self, items):
        """Return ``input_ids``, ``attention_mask`` and ``labels``, [batch, length], padded on the right."""
        length = max(2, *(len(item["input_ids"]) for item in items))
        shape, padding = (len(items), length), self.tokenizer.pad_token_id or 0
        input_ids, mask = torch.full(shape, padding), torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED_LABEL)
        for row, item in enumerate(items):
            tokens = item["input_ids"]
            input_ids[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}

    def loss(self, model, batch):
        return model(**batch, **self.options).loss

    def finish(self, directory):
        self.tokenizer.save_pretrained(directory)


class MaskedLanguage(CausalLanguage):
    def automatic(self):
        from transformers import AutoModelForMaskedLM

        return AutoModelForMaskedLM

    def drawn(self, batch, epoch):
        text = f"{self.config.train.seed}:{epoch}:{batch['input_ids'].tolist()}"
        seed = hashlib.blake2b(text.encode(), digest_size=7).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(seed, "big"))
        draws = torch.rand(batch["labels"].shape, generator=generator).to(batch["labels"].device)
        hidden = (draws < self.config.task.mask_probability) & (batch["attention_mask"] == 1)
        hidden[:, 0] = True  # so that every batch predicts something
        return {
            **batch,
            "labels": batch["labels"].masked_fill(~hidden, IGNORED_LABEL),
            "input_ids": batch["input_ids"].masked_fill(hidden, self.tokenizer.mask_token_id),
        }


CAUSAL = f"{__name__}:{CausalLanguage.__name__}"
MASKED = f"{__name__}:{MaskedLanguage.__name__}"
