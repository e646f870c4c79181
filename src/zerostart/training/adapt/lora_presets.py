"""Lists of LoRA's targets by name."""

from __future__ import annotations

#: As DiffSynth-Studio's scripts have them after ``--lora_target_modules``, to the letter. ``flux2-npu`` is
#: that of its FLUX.2-dev script for NPUs (``FLUX.2-dev-Lora-NPU.sh``), which has the last projection of each
#: of the 48 single blocks. Entries that a smaller model does not have are passed over.
PRESETS = {
    "flux2-npu": (
        "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_qkv_mlp_proj,to_out.0,to_add_out,linear_in,"
        "linear_out,single_transformer_blocks.0.attn.to_out,single_transformer_blocks.1.attn.to_out,"
        "single_transformer_blocks.2.attn.to_out,single_transformer_blocks.3.attn.to_out,"
        "single_transformer_blocks.4.attn.to_out,single_transformer_blocks.5.attn.to_out,"
        "single_transformer_blocks.6.attn.to_out,single_transformer_blocks.7.attn.to_out,"
        "single_transformer_blocks.8.attn.to_out,single_transformer_blocks.9.attn.to_out,"
        "single_transformer_blocks.10.attn.to_out,single_transformer_blocks.11.attn.to_out,"
        "single_transformer_blocks.12.attn.to_out,single_transformer_blocks.13.attn.to_out,"
        "single_transformer_blocks.14.attn.to_out,single_transformer_blocks.15.attn.to_out,"
        "single_transformer_blocks.16.attn.to_out,single_transformer_blocks.17.attn.to_out,"
        "single_transformer_blocks.18.attn.to_out,single_transformer_blocks.19.attn.to_out,"
        "single_transformer_blocks.20.attn.to_out,single_transformer_blocks.21.attn.to_out,"
        "single_transformer_blocks.22.attn.to_out,single_transformer_blocks.23.attn.to_out,"
        "single_transformer_blocks.24.attn.to_out,single_transformer_blocks.25.attn.to_out,"
        "single_transformer_blocks.26.attn.to_out,single_transformer_blocks.27.attn.to_out,"
        "single_transformer_blocks.28.attn.to_out,single_transformer_blocks.29.attn.to_out,"
        "single_transformer_blocks.30.attn.to_out,single_transformer_blocks.31.attn.to_out,"
        "single_transformer_blocks.32.attn.to_out,single_transformer_blocks.33.attn.to_out,"
        "single_transformer_blocks.34.attn.to_out,single_transformer_blocks.35.attn.to_out,"
        "single_transformer_blocks.36.attn.to_out,single_transformer_blocks.37.attn.to_out,"
        "single_transformer_blocks.38.attn.to_out,single_transformer_blocks.39.attn.to_out,"
        "single_transformer_blocks.40.attn.to_out,single_transformer_blocks.41.attn.to_out,"
        "single_transformer_blocks.42.attn.to_out,single_transformer_blocks.43.attn.to_out,"
        "single_transformer_blocks.44.attn.to_out,single_transformer_blocks.45.attn.to_out,"
        "single_transformer_blocks.46.attn.to_out,single_transformer_blocks.47.attn.to_out"
    ),
}
