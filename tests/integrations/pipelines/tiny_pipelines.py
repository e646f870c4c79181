"""Small diffusers pipelines with random weights, written by ``save_pretrained``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.conformance.checkpoints import randomise
from tests.conformance.diffusion_suite import family
from tests.diffusion.components import COMPONENTS

WORDS = ("<pad>", "<s>", "</s>", "<unk>", "a", "cat", "sees", "the", "sea", "and", "sleeps", "user", "prompt")
VOCABULARY = 120
TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

_WAN = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 12}
#: Arguments of each pipeline in addition to a prompt and a generator.
CALLS: Mapping[str, Mapping[str, Any]] = {
    "wan": _WAN,
    "wan_of_two": _WAN,
    "qwen_image": {"height": 16, "width": 16, "max_sequence_length": 24, "negative_prompt": "a cat"},
    "flux": {"height": 16, "width": 16, "max_sequence_length": 12},
    "flux2": {
        **{"height": 16, "width": 16, "guidance_scale": 3.0, "max_sequence_length": 12},
        "text_encoder_out_layers": (1, 2, 3),
    },
    "z_image": {"height": 16, "width": 16, "max_sequence_length": 12},
    "hunyuan_video": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 12},
    "ltx2": {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 12},
}


def tokenizer(template: bool = False) -> Any:
    """Return a tokenizer of ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=77,
    )
    if template:
        wrapped.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    return wrapped


def component(key: str, **changes: Any) -> Any:
    """Build a random model of a family of the conformance suite."""
    import diffusers

    case = family(key)
    return getattr(diffusers, case.kind).from_config({**case.config, **changes})


def part(key: str, **changes: Any) -> Any:
    """Build a component of ``tests/diffusion/components.py``."""
    case = COMPONENTS[key]
    return case.find_class().from_config({**case.config, **changes})


def scheduler(**settings: Any) -> Any:
    import diffusers

    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def umt5() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    return UMT5EncoderModel(UMT5Config(vocab_size=VOCABULARY, **sizes))


def wan() -> Any:
    import diffusers

    vae = component("wan_vae", z_dim=4, latents_mean=[0.5, 0.25, 0.1, 0], latents_std=[1.5, 1.25, 1.1, 1])
    return diffusers.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=umt5(),
        vae=vae,
        scheduler=scheduler(shift=3.0),
        transformer=component("wan", out_channels=4, text_dim=16),
    )


def wan_of_two() -> Any:
    """Wan2.2's layout with two experts, one for each half of the noise."""
    pipe = wan()
    pipe.register_modules(transformer_2=component("wan", out_channels=4, text_dim=16))
    pipe.register_to_config(boundary_ratio=0.9)
    return pipe


def qwen_image() -> Any:
    import diffusers
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    vae = component(
        "qwen_image_vae", z_dim=4, latents_mean=[0.5, 0.25, 0.1, 0], latents_std=[1.5, 1.25, 1.1, 1]
    )
    return diffusers.QwenImagePipeline(
        tokenizer=tokenizer(template=True),
        text_encoder=encoder,
        vae=vae,
        scheduler=scheduler(use_dynamic_shifting=True),
        transformer=component("qwen_image", joint_attention_dim=16),
    )


def flux() -> Any:
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=20,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=20,
    )
    t5 = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    transformer = component(
        "flux",
        in_channels=20,
        pooled_projection_dim=20,
        joint_attention_dim=16,
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        text_encoder=CLIPTextModel(clip),
        text_encoder_2=T5EncoderModel(t5),
        vae=component("flux_vae", shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        scheduler=scheduler(use_dynamic_shifting=True),
        transformer=transformer,
    )


def qwen3(layers: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**TEXT, "num_hidden_layers": layers}, head_dim=8)


def flux2() -> Any:
    """Flux2 Klein, whose captions join three layers of Qwen3."""
    import diffusers
    from transformers import Qwen3ForCausalLM

    return diffusers.Flux2KleinPipeline(
        tokenizer=tokenizer(template=True),
        text_encoder=Qwen3ForCausalLM(qwen3(3)),
        vae=component("flux2_vae"),
        scheduler=scheduler(use_dynamic_shifting=True),
        transformer=component("flux2", in_channels=20, joint_attention_dim=48, guidance_embeds=False),
    )


def z_image() -> Any:
    import diffusers
    from transformers import Qwen3Model

    return diffusers.ZImagePipeline(
        tokenizer=tokenizer(template=True),
        text_encoder=Qwen3Model(qwen3(2)),
        vae=component("flux_vae", shift_factor=0.1),
        scheduler=scheduler(shift=3.0),
        transformer=component("z_image", cap_feat_dim=16),
    )


def hunyuan_video() -> Any:
    """HunyuanVideo; the template has four tokens fewer than the released one."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    clip = CLIPTextConfig(vocab_size=VOCABULARY, **{**sizes, "hidden_size": 20})
    return diffusers.HunyuanVideoPipeline(
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        text_encoder=LlamaModel(LlamaConfig(vocab_size=VOCABULARY, **sizes)),
        text_encoder_2=CLIPTextModel(clip),
        vae=part("hunyuan-video vae"),
        scheduler=scheduler(shift=7.0),
        transformer=part("hunyuan-video"),
    )


def ltx2() -> Any:
    """LTX-2, with sound: spectrograms of 8 bands, latents of 2 bands with 2 channels."""
    import diffusers
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**TEXT, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    gemma = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 4}
    connectors = {f"{kind}_connector_{name}": n for kind in ("video", "audio") for name, n in heads.items()}
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=8,
    )
    return diffusers.LTX2Pipeline(
        tokenizer=tokenizer(),
        text_encoder=Gemma3ForConditionalGeneration(gemma),
        connectors=LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=3, connector_rope_base_seq_len=32, **connectors
        ),
        vae=part("ltx-2 vae"),
        audio_vae=sound,
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
        ),
        scheduler=scheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024
        ),
        transformer=part("ltx-2"),
    )


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "wan": wan,
    "wan_of_two": wan_of_two,
    "qwen_image": qwen_image,
    "flux": flux,
    "flux2": flux2,
    "z_image": z_image,
    "hunyuan_video": hunyuan_video,
    "ltx2": ltx2,
}


def make_pipeline(key: str, path: Path) -> Path:
    """Write the pipeline of a family with random weights."""
    torch.manual_seed(5)
    pipe = FAMILIES[key]()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            randomise(part)
            for name, buffer in part.named_buffers():
                if name.endswith(("running_var", "latents_std")):
                    buffer.abs_()  # used as a divisor, or under a root
    pipe.save_pretrained(path)
    return path


def equal_but_for_rounding(a: torch.Tensor, b: torch.Tensor, limit: float = 1e-5) -> bool:
    """Compare two pictures; sums depend on the alignment of their operands."""
    return bool((a - b).abs().max() <= limit * b.abs().max())
