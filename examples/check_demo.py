"""Open the model of demo.py with plain transformers, and compare it with what was trained.

The held-out loss is computed again from the saved files and compared with the Trainer's.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, logging

from demo import BATCH, HELD_OUT, masked_rows

SENTENCE = "Open a file, read the lines of the file, and close the [MASK]."
TOLERANCE = 1e-3  # sums in another order
NEXT = """
Next: these commands in your shell:          . .venv/bin/activate
      is it what was saved? what is in it?   zerostart verify {out}; zerostart inspect {out}
      the same on FSDP2; a picture model:    make demo ENGINE=fsdp2; make demo-diffusion
      a script that you have, unchanged:     accelerate launch --config_file zero3.yaml -m zerostart SCRIPT.py
      scripts to begin with, tutorials:      docs/examples.md, docs/index.md"""


@torch.no_grad()
def main() -> int:
    directory = Path(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, info = AutoModelForMaskedLM.from_pretrained(directory, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    print(
        f"plain transformers loads {directory}: {type(model).__name__}, {problems or 'every tensor matches'}"
    )

    log = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    before, after = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    held_out = masked_rows(tokenizer)[:HELD_OUT]
    losses = []
    for start in range(0, HELD_OUT, BATCH):
        batch = {
            key: torch.stack([row[key] for row in held_out[start : start + BATCH]]) for key in held_out[0]
        }
        losses.append(model.eval()(**batch).loss)
    again = float(torch.stack(losses).mean())
    print(f"held-out loss in shards: {before:.4f} before, {after:.4f} after 20 steps")
    print(f"held-out loss from the saved files:      {again:.4f}")
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    scores = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id][0]
    words = " ".join(tokenizer.decode(token) for token in scores.topk(5).indices)
    print(f"likeliest words in {SENTENCE!r}: {words}")
    if problems or abs(again - after) > TOLERANCE:
        print("error: the saved model is not the one that was trained", file=sys.stderr)
        return 1
    print(NEXT.format(out=directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
