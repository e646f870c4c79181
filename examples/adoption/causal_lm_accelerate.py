"""Fine-tune a causal language model on a text file: a loop of one's own over accelerate.

accelerate launch --config_file accelerate_config_zero3.yaml causal_lm_accelerate.py \
    --model path/or/hub-id --text corpus.txt --out tuned
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import zerostart

zerostart.enable()  # the one added line (and its import)


def main() -> None:
    args = arguments()
    set_seed(args.seed)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.train()
    loader = DataLoader(blocks(tokenizer, args.text, args.block), batch_size=args.batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    while steps < args.steps:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                accelerator.print(f"step {steps} loss {accelerator.reduce(loss.detach(), 'mean').item()}")
            if steps == args.steps:
                break
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.out, is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.end_training()


def blocks(tokenizer: AutoTokenizer, text: Path, length: int) -> list[torch.Tensor]:
    """The text as token ids, in pieces of ``length``."""
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])
    return [piece for piece in ids.split(length) if len(piece) == length]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, or an identifier of the hub")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
