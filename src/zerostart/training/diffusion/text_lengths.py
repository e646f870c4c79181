"""Whether a pipeline has cut a text off: its tokenizers are asked how long it is, before they cut it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

#: Arguments of a tokenizer by which it cuts, fills up and converts.
_SHAPING = ("truncation", "max_length", "padding", "pad_to_multiple_of", "return_tensors")


class TextLengths:
    """The longest text that tokenizers of a pipeline were to cut since ``begin``, in tokens."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        """Have the tokenizers of ``pipe``, and those of its processors, count before they cut.

        Not CLIP's, which sees the first 77 tokens of any text beside another encoder that sees all.
        """
        from transformers import PreTrainedTokenizerBase

        self._longest = (0, 0)
        # Qwen-Image's pipeline cuts embeddings, after those of its own words were taken out.
        self._own_words: int | None = getattr(pipe, "prompt_template_encode_start_idx", None)
        for part in pipe.components.values():
            for one in (part, getattr(part, "tokenizer", None)):
                if isinstance(one, PreTrainedTokenizerBase) and not type(one).__name__.startswith("CLIP"):
                    self._count(one)

    def _count(self, tokenizer: Any) -> None:
        kind, lengths = type(tokenizer), self

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Only a call that may cut is counted: pipelines also call tokenizers without a limit, to compare.
            if kwargs.get("truncation") and kwargs.get("max_length"):
                whole = {key: value for key, value in kwargs.items() if key not in _SHAPING}
                # The class's own call, for the object's would count again. `verbose=False`: no warning of
                # long texts.
                ids = kind.__call__(self, *args, **whole, verbose=False)["input_ids"]
                rows = ids if ids and isinstance(ids[0], list) else [ids]
                lengths.note(max(map(len, rows)), kwargs["max_length"])
            return kind.__call__(self, *args, **kwargs)

        # Of this object alone: a call is looked up in its class.
        tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": counting})

    def begin(self) -> None:
        """Forget what was counted."""
        self._longest = (0, 0)

    def note(self, count: int, most: int) -> None:
        """A text of ``count`` tokens was to be cut to ``most``."""
        # By how far the limit is passed, for tokenizers of one pipeline have limits of their own. A text
        # within its limit is noted as well: `cut` may find it past the pipeline's.
        if count - most > self._longest[0] - self._longest[1] or self._longest == (0, 0):
            self._longest = (count, most)

    def cut(self, limit: int) -> str | None:
        """In words by how much a text was too long; None where all of it is there.

        ``limit`` is the pipeline's ``max_sequence_length``.
        """
        count, most = self._longest
        if self._own_words is not None and count:
            # The limit of the tokenizer includes the template; the pipeline cuts the embeddings to `limit`
            # afterwards.
            count, most = count - self._own_words, min(most - self._own_words, limit)
        if count <= most:
            return None
        return f"its text has {count} tokens with the pipeline's own, of which {most} are taken"
