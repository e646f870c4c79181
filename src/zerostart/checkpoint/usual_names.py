"""Names of the files of a checkpoint, by which it is found where a directory cannot be listed."""

from __future__ import annotations

#: The names that transformers and diffusers look for, in their order: safetensors before torch files.
STANDARD_NAMES = tuple(
    f"{stem}{suffix}{index}"
    for stem, suffix in (
        ("model", ".safetensors"),
        ("diffusion_pytorch_model", ".safetensors"),
        ("pytorch_model", ".bin"),
        ("diffusion_pytorch_model", ".bin"),
    )
    for index in ("", ".index.json")
)
#: What lies in a pipeline of diffusers, whose models have folders of their own.
PIPELINE_INDEX = "model_index.json"
#: What a model's repository has beside its weights.
SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
#: The usual ones of these: configuration, tokenizer, processors, and what zerostart and diffusers write.
USUAL_SETTINGS = (
    *("config.json", "generation_config.json", PIPELINE_INDEX, "zerostart.json", "state.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
    *("scheduler_config.json", "adapter_config.json"),
)
