"""What runs of the runner are made of: a tokenizer of single characters."""

import pytest

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer of single characters that fits the vocabularies of the tiny models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tokenizer")
    tokens = ["<unk>", "<bos>", "</s>", *CHARACTERS, "<mask>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        mask_token="<mask>",
        pad_token="<pad>",
    ).save_pretrained(path)
    return path
