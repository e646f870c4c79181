"""Names of the files of a checkpoint, for directories that cannot be listed."""

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
#: Index of a diffusers pipeline, which has a folder for each model.
PIPELINE_INDEX = "model_index.json"
#: Patterns of the files next to the weights in a model's repository.
SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
#: Usual names of config, tokenizer and processor files, and of what zerostart and diffusers write.
USUAL_SETTINGS = (
    *("config.json", "generation_config.json", PIPELINE_INDEX, "zerostart.json", "state.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
    *("scheduler_config.json", "adapter_config.json"),
)
