"""Character tokenizers of the classes that DiffSynth's pipelines load."""

import json
import string
from pathlib import Path
from typing import Any

#: Rows of the text encoders' embeddings; no tokenizer has more tokens.
VOCABULARY = 640
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizers(root: Path) -> None:
    """Write ``qwen``, ``clip``, ``t5``, and ``qwen_vl``, which also takes images."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    qwen = Qwen2Tokenizer(vocab={token: n for n, token in enumerate([*letters, *marks])}, merges=[])
    qwen.add_special_tokens({"additional_special_tokens": marks[1:]})
    qwen.chat_template = _CHAT
    qwen.save_pretrained(root / "qwen")
    # The end token comes last: CLIP takes its features at the largest token.
    ends = ["<|startoftext|>", "<|endoftext|>"]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    CLIPTokenizer(vocab={token: n for n, token in enumerate(tokens)}, merges=[]).save_pretrained(
        root / "clip"
    )
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits]
    T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0).save_pretrained(root / "t5")
    _write_processor(qwen, root / "qwen_vl")


def _write_processor(tokenizer: Any, folder: Path) -> None:
    """Write files only: building the processor needs torchvision when transformers is imported."""
    tokenizer.save_pretrained(folder)
    for name, settings in {
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config": {"video_processor_type": "Qwen2VLVideoProcessor"},
        "processor_config": {"processor_class": "Qwen2VLProcessor"},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
