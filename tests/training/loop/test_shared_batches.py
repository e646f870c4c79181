"""Parts of batches whose sequences ranks share, and the masks of whole sequences that DeepSpeed drops."""

import pytest
import torch

from zerostart.engines import check_choice
from zerostart.geometry.layout import Mesh
from zerostart.training.loop.batches import Sharing
from zerostart.training.tasks.language import IGNORED_LABEL

LENGTHS = (7, 1, 4)


def batch():
    """Three sequences, padded to 7 tokens."""
    mask = torch.tensor([[1] * length + [0] * (7 - length) for length in LENGTHS])
    tokens = torch.arange(21).view(3, 7) + 10
    labels = torch.where(mask.bool(), tokens, IGNORED_LABEL)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_make_up_the_whole(engine, size):
    """Each token is in one part, with its position and with the token after it as its label."""
    whole, kind = batch(), check_choice(engine, 3)
    engine = kind.for_stage(3, None, Mesh(2 * size, sequence_parallel=size), None)
    predicted = sum(length - 1 for length in LENGTHS)
    parts = [Sharing(*engine.sequence_chunks(rank), 4).part(whole, predicted) for rank in range(size)]
    assert sum(weight for _, weight in parts) == predicted
    assert len({part["input_ids"].shape for part, _ in parts}) == 1
    seen = set()
    for part, weight in parts:
        assert part["labels"] is part["shift_labels"]
        for row in range(4):
            for column, position in enumerate(part["position_ids"][row].tolist()):
                seen.add((row, position))
                token, label = part["input_ids"][row, column], int(part["labels"][row, column])
                if row == 3 or position >= 7:
                    assert (int(token), int(part["attention_mask"][row, column])) == (0, 0)
                    continue
                assert token == whole["input_ids"][row, position]
                after = position + 1
                wanted = int(whole["input_ids"][row, after]) if after < LENGTHS[row] else IGNORED_LABEL
                assert label == wanted or (weight == 0 and (row, column) == (0, 0))
    count = engine.sequence_chunks(0)[1]
    assert seen == {(row, position) for row in range(4) for position in range(-(-7 // count) * count)}


def test_a_part_that_predicts_nothing_has_a_loss_and_no_weight():
    short = {key: value[1:2] for key, value in batch().items()}
    for rank in range(2):
        part, weight = Sharing((rank,), 2, 1).part(short, 0)
        assert weight == 0
        assert int((part["labels"] != IGNORED_LABEL).sum()) == 1


def test_masks_are_those_of_transformers():
    from transformers import Qwen3Config
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    from zerostart.upstream.deepspeed.parallel.ulysses import _mask_of

    config = Qwen3Config(hidden_size=8, num_attention_heads=2, use_sliding_window=True, sliding_window=3)
    config._attn_implementation = "sdpa"
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    given = (config, torch.zeros(2, 8, 8), None, None, positions)
    assert torch.equal(_mask_of(positions, None), create_causal_mask(*given))
    assert torch.equal(_mask_of(positions, 3), create_sliding_window_causal_mask(*given))
    plain = torch.arange(8)[None]
    assert _mask_of(plain, None) is _mask_of(plain, 8) is None
    alone = create_sliding_window_causal_mask(config, torch.zeros(1, 8, 8), None, None, plain)
    assert torch.equal(_mask_of(plain, 3), alone)
