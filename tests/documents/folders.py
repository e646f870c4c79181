"""Write tiny models under the folder names that pages use."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.tiny import TinyCheckpoints


def make_folders(root: Path, models: Mapping[str, str], checkpoints: TinyCheckpoints) -> None:
    """Write under ``root`` one folder for each name of ``models``.

    A value is a tiny checkpoint's name in ``tests/tiny.py`` (``text:NAME`` with a tokenizer of characters);
    ``pipeline:FAMILY``, a diffusers pipeline of ``tests/integrations/pipelines/tiny_pipelines.py``;
    or ``pictures:ROWS``, photographs and a table.
    """
    for name, kind in models.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix, _, key = kind.rpartition(":")
        if prefix == "pipeline":
            _pipeline(key, path)
        elif prefix == "pictures":
            _pictures(path, int(key))
        else:
            shutil.copytree(checkpoints(key), path)
            if prefix == "text":
                write_character_tokenizer(path)


def write_character_tokenizer(path: Path) -> None:
    """Write a tokenizer of single characters that fits the tiny models' vocabularies."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<bos>", "</s>", *"abcdefghijklmnopqrstuvwxyz .,", "<mask>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        mask_token="<mask>",
        pad_token="<pad>",
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
