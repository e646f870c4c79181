"""A tokenizer for random weights: its letters are bytes, so that it knows every text without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerostart.errors import WriteError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Tokens with a role, in the order in which ids are given where the configuration has none for them. Those
#: of the second line are there only if the configuration has them.
_ALWAYS = ("eos", "pad", "mask")
_NAMED = ("bos", "cls", "sep", "unk")
#: Every message by its role and content: the same for all models, as none has been trained on any.
_CHAT = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(config: Any, out: Path) -> bool:
    """Write a tokenizer with as many tokens as ``config`` has room for; whether there is any room.

    ``AutoTokenizer.from_pretrained`` takes it. Raises WriteError where it cannot be written.
    """
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < len(_ALWAYS) + 1:
        return False
    made = byte_tokenizer(config, size)
    try:
        made.save_pretrained(out)
    except OSError as error:
        raise WriteError(f"{out}: the tokenizer cannot be written: {error.strerror}") from error
    return True


def byte_tokenizer(config: Any, size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``size`` tokens: the bytes of UTF-8, tokens with a role by the ids of ``config``.

    The rest are names that occur in no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, roles = _special(config, size)
    free = (number for number in range(size) if number not in tokens)
    letters = dict(zip(free, _letters(), strict=False))
    lost = len(letters) < len(_letters())
    rest = {number: f"<|unused{number}|>" for number in range(size)}
    vocabulary = {token: number for number, token in (rest | letters | tokens).items()}
    # What has no token, in a vocabulary of less than all bytes, is some token still.
    unknown = roles.get("unk_token", roles["eos_token"]) if lost else None
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    longest = getattr(config, "max_position_embeddings", None)
    limit = {"model_max_length": longest} if isinstance(longest, int) else {}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, **roles, **limit)
    made.chat_template = _CHAT
    return made


def _special(config: Any, size: int) -> tuple[dict[int, str], dict[str, str]]:
    """The names of tokens with a role by their ids, and by the arguments of a tokenizer."""
    tokens: dict[int, str] = {}
    roles: dict[str, str] = {}
    missing = []
    for role in (*_ALWAYS, *_NAMED):
        given = getattr(config, f"{role}_token_id", None)
        first = given[0] if isinstance(given, list | tuple) and given else given
        if type(first) is int and 0 <= first < size:
            roles[f"{role}_token"] = tokens.setdefault(first, f"<|{role}|>")
        elif role in _ALWAYS:
            missing.append(role)
    last = (number for number in reversed(range(size)) if number not in tokens)
    for role, number in zip(missing, list(last), strict=False):
        roles[f"{role}_token"] = tokens[number] = f"<|{role}|>"
    return tokens, roles


def _letters() -> list[str]:
    """Bytes of UTF-8 as tokenizers spell them; ASCII first, for where there is not room for all."""
    from tokenizers import pre_tokenizers

    known = pre_tokenizers.ByteLevel.alphabet()
    # Of bytes that can be printed the letter is the byte's own, of others one beyond Latin-1 (as in GPT-2);
    # these 13 bytes are in no text of UTF-8.
    never = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    return sorted(set(known) - never, key=lambda letter: (letter not in "ĠĊ", not letter.isascii(), letter))
