"""Fixtures of training tests: a tokenizer of single characters, and one thread."""

import pytest
import torch

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,"


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread, as encoders on a CPU do: the bits depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """Path of a tokenizer of single characters that fits the tiny models' vocabularies."""
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
