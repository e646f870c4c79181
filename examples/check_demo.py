"""Load what the demo saved with plain transformers, and show that it is what was trained.

The held-out loss is computed again from the files alone and compared with the one that the training
measured in the sharded model; then the model fills in a word.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, logging

from zerostart.training.config.load import load_config
from zerostart.training.loop.evaluate import held_out_batches
from zerostart.training.loop.task import task_class

SENTENCE = "Open a file, read the lines of the file, and close the [MASK]."
TOLERANCE = 1e-3  # sums in another order


def main() -> int:
    config = load_config(sys.argv[1], sys.argv[2:])
    directory = Path(config.output.directory)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, info = AutoModelForMaskedLM.from_pretrained(directory, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    print(
        f"plain transformers loads {directory}: {type(model).__name__}, {problems or 'every tensor matches'}"
    )

    measured = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    held_out = [(entry["step"], entry["held_out_loss"]) for entry in measured if "held_out_loss" in entry]
    loss = held_out_loss(model, tokenizer, config)
    for step, value in held_out:
        print(f"held-out loss, sharded, after step {step:>3}: {value:.4f}")
    print(f"held-out loss, from the saved files:    {loss:.4f}")
    words = " ".join(fill(model, tokenizer))
    print(f"likeliest words in {SENTENCE!r}: {words}")
    print("(frequent ones: its head, missing from the checkpoint, has seen these few steps only)")

    if problems or abs(loss - held_out[-1][1]) > TOLERANCE:
        print("error: the saved model is not the one that was trained", file=sys.stderr)
        return 1
    return 0


@torch.no_grad()
def held_out_loss(model, tokenizer, config) -> float:
    task = task_class(config.task.name)(config)
    task.open()
    task.tokenizer = tokenizer  # the one that was saved
    _, held_out = task.split(task.items(None))
    batches = held_out_batches(task, held_out, config.train.batch_size, config.train.seed)
    total = sum(float(model.eval()(**batch).loss) * predicted for batch, predicted in batches)
    return total / sum(predicted for _, predicted in batches)


@torch.no_grad()
def fill(model, tokenizer) -> list[str]:
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    scores = model.eval()(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id][0]
    return [tokenizer.decode(token) for token in scores.topk(5).indices]


if __name__ == "__main__":
    sys.exit(main())
