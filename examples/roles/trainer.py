"""Fine-tune a language model with the Hugging Face Trainer, in shards, and go on after a stop.

accelerate launch --config_file fsdp2.yaml trainer.py Qwen/Qwen3-0.6B corpus.txt out

``zerostart.enable()`` is the one line that such a script needs, TRL's trainers too. Which engine, the file of
the launcher says (examples/adoption has three).
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import zerostart

zerostart.enable()

source, text, out = sys.argv[1:]
arguments = TrainingArguments(
    out, max_steps=20, save_steps=10, logging_steps=1, learning_rate=2e-5, report_to=[]
)
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source)
tokens = tokenizer(Path(text).read_text(), return_tensors="pt")["input_ids"][0]
rows = [{"input_ids": row, "labels": row} for row in tokens.unfold(0, 32, 32)]

trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if Path(out).exists() else None)
trainer.save_model()  # each rank its own bytes; plain transformers opens it
