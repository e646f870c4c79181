"""How many tokens a model has positions for, by what torch itself does of one more."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zerostart.errors import ConfigError
from zerostart.models.shrink import tiny
from zerostart.training.tasks.language import check_positions, position_table

#: By model type: the rows of its table that tokens have. Of RoBERTa's 128 the first two are for padding; OPT
#: has two more than it tells; GPT-J's is calculated, a buffer of every block; ProphetNet looks one ahead, and
#: of TAPAS the last row goes on.
TABLES = {"gpt2": 128, "opt": 128, "gptj": 128, "bert": 128, "roberta": 126, "ibert": 126, "llama": None}
TABLES |= {"bloom": None, "prophetnet": 126, "tapas": None}
MASKED = ("bert", "roberta", "ibert", "tapas")


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_positions_ends_where_torch_says(kind):
    config = CONFIG_MAPPING[kind].from_dict(tiny(CONFIG_MAPPING[kind]().to_dict()))
    automatic = AutoModelForMaskedLM if kind in MASKED else AutoModelForCausalLM
    model = automatic.from_config(config).eval()
    found = position_table(model, config)
    assert (found and found[1]) == TABLES[kind]
    most = TABLES[kind] or 200
    tokens = torch.full((1, most + 1), 7)
    with torch.no_grad():
        model(input_ids=tokens[:, :-1])
        if found is None:
            model(input_ids=tokens)
            check_positions(model, config, most + 1, "data.sequence_length")
            return
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=tokens)
    check_positions(model, config, most, "data.sequence_length")
    with pytest.raises(ConfigError, match=rf"up to {most + 1} tokens, .* to {most} or less"):
        check_positions(model, config, most + 1, "data.sequence_length")
