"""Code that lies in a checkpoint or beside a tokenizer: run where that is asked for, and nowhere else."""

import json
import shutil

import pytest

from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config
from zerostart.training.tasks.language import CausalLanguage

CODE = """
import pathlib
pathlib.Path({ran!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Strange(PretrainedConfig):
    model_type = "strange"
    vocab_size = 99
class Cutter(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def strange(tmp_path, tokenizer_path, checkpoints, monkeypatch):
    """Builds a task whose model or tokenizer has code of its own; somebody says yes to all that is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "stranger"
    shutil.copytree(tokenizer_path, folder)
    (folder / "code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))

    def make(what, trusted):
        if what == "model":
            described = {"model_type": "strange", "auto_map": {"AutoConfig": "code.Strange"}}
            (folder / "config.json").write_text(json.dumps(described))
            source, tokenizer = folder, tokenizer_path
        else:
            file = folder / "tokenizer_config.json"
            given = json.loads(file.read_text())
            given |= {"tokenizer_class": "Cutter", "auto_map": {"AutoTokenizer": [None, "code.Cutter"]}}
            file.write_text(json.dumps(given))
            source, tokenizer = checkpoints("qwen3"), folder
        values = {"model": {"source": str(source)}, "data": {"source": "x", "tokenizer": str(tokenizer)}}
        values |= {"task": {"name": "causal-lm"}, "train": {"steps": 1}, "output": {"directory": "out"}}
        values["model"] |= {"trust_remote_code": True} if trusted else {}
        return CausalLanguage(parse_config(values)), tmp_path / "ran"

    return make


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_of_a_stranger_is_run_where_it_is_asked_for(what, strange):
    task, ran = strange(what, False)
    with pytest.raises(
        ConfigError, match=rf"stranger: the {what} is made by code .*model\.trust_remote_code=true"
    ):
        task.open()
    assert not ran.exists()
    task, ran = strange(what, True)
    task.open()
    assert ran.exists()
