"""Fine-tune a causal language model on a text file with the HF Trainer.

accelerate launch --config_file accelerate_config_zero3.yaml causal_lm_trainer.py \
    --model path/or/hub-id --text corpus.txt --output_dir tuned --max_steps 20
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

import zerostart

zerostart.enable()  # the one added line (and its import)


@dataclass
class Arguments:
    model: str = field(metadata={"help": "a directory, or an identifier of the hub"})
    text: str = field(metadata={"help": "a text file"})
    block: int = field(default=128, metadata={"help": "tokens in an example"})


def main() -> None:
    own, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(own.model)
    model = AutoModelForCausalLM.from_pretrained(own.model)
    ids = torch.tensor(tokenizer(Path(own.text).read_text())["input_ids"])
    pieces = [piece for piece in ids.split(own.block) if len(piece) == own.block]
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
