"""Folders by the names that pages use, with tiny models in them."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.tiny import TinyCheckpoints


def make_folders(root: Path, models: Mapping[str, str], checkpoints: TinyCheckpoints) -> None:
    """Under ``root`` for each name one of:

    a tiny checkpoint by its name in ``tests/tiny.py`` (``text:NAME`` with a tokenizer of characters);
    ``pipeline:FAMILY``, a diffusers pipeline of ``tests/integrations/pipelines/tiny_pipelines.py``;
    or ``pictures:ROWS``, photographs and a table.
    """
    for name, kind in models.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        what, _, key = kind.rpartition(":")
        if what == "pipeline":
            _pipeline(key, path)
        elif what == "pictures":
            _pictures(path, int(key))
        else:
            shutil.copytree(checkpoints(key), path)
            if what == "text":
                character_tokenizer(path)


def character_tokenizer(path: Path) -> None:
    """A tokenizer of single characters that fits the vocabularies of the tiny models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<bos>", "</s>", *"abcdefghijklmnopqrstuvwxyz .,", "<mask>", "<pad>"]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", mask_token="<mask>", pad_token="<pad>"
    ).save_pretrained(path)


def _pipeline(key: str, path: Path) -> None:
    from tests.integrations.pipelines.tiny_pipelines import make_pipeline

    make_pipeline(key, path)


def _pictures(path: Path, rows: int) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    path.mkdir()
    for name, picture in zip(("two", "one"), load_sample_images().images, strict=True):
        Image.fromarray(picture).save(path / f"{name}.png")
    table = ["one.png,a flower in the sun", "two.png,a temple in the mountains"] * rows
    (path / "metadata.csv").write_text("\n".join(["image,prompt", *table[:rows]]) + "\n")
