"""Make a small diffusion pipeline for the digits, as diffusers saves one: `python digits_pipeline.py FOLDER`.

FOLDER/pictures has the digits and their captions. FOLDER/pipeline is a FLUX pipeline whose text encoders are
MiniLM, whose autoencoder is trained here, and whose transformer knows nothing yet.
"""

import argparse
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch.nn.functional import mse_loss
from transformers import AutoModel, AutoTokenizer

import digits
from demo import minilm_directory

TOKENS = 8  # of a caption, padding included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=250, help="of the autoencoder's training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    digits.write_table(options.folder / "pictures")
    vae = trained_autoencoder(options.steps)
    tokenizer = AutoTokenizer.from_pretrained(minilm_directory(), model_max_length=TOKENS)
    encoder = AutoModel.from_pretrained(minilm_directory())
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=encoder.config.hidden_size,
            pooled_projection_dim=encoder.config.hidden_size,
            axes_dims_rope=(8, 12, 12),
        ),
    )
    pipeline.save_pretrained(options.folder / "pipeline")
    sizes = {
        name: sum(p.numel() for p in getattr(pipeline, name).parameters()) for name in ("vae", "transformer")
    }
    print(", ".join(f"{name}: {size:,} parameters" for name, size in sizes.items()))


def trained_autoencoder(steps: int) -> AutoencoderKL:
    """Pictures of 3 x 16 x 16 become latents of 4 x 8 x 8."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=digits.SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    images = digits.to_learn_from()[0] * 2 - 1
    optimizer = torch.optim.AdamW(vae.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    start = time.monotonic()
    for step in range(1, steps + 1):
        batch = images[torch.randint(len(images), (32,))]
        latents = vae.encode(batch).latent_dist
        error = mse_loss(vae.decode(latents.sample()).sample, batch)
        optimizer.zero_grad()
        (error + 1e-3 * latents.kl().mean() / latents.mean[0].numel()).backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(
                f"autoencoder step {step}/{steps}  error {error:.4f}  {time.monotonic() - start:.0f} s",
                flush=True,
            )
    vae.eval()
    with torch.no_grad():
        every = torch.cat([vae.encode(batch).latent_dist.mode() for batch in images.split(128)])
    vae.register_to_config(shift_factor=float(every.mean()), scaling_factor=float(1 / every.std()))
    return vae


if __name__ == "__main__":
    main()
