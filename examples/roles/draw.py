"""Run a diffusion pipeline in shards on two ranks, with a LoRA, each rank with prompts of its own.

torchrun --nproc-per-node 2 draw.py Qwen/Qwen-Image out 1024 "a flower in the sun" "a temple" "a cat"
"""

import sys

import torch
import torch.distributed as dist

import zerostart

source, lora, size, *prompts = sys.argv[1:]
dist.init_process_group()
rank = dist.get_rank()
pipe = zerostart.load_pipeline(
    source,
    placement={"transformer": "shard", "text_encoder": "shard", "vae": "replicate"},
    engine="fsdp2",
    dtype=torch.bfloat16,
)
pipe.load_lora_weights(lora)
# All ranks make the same number of calls: one with fewer prompts repeats its last.
for first in range(0, len(prompts), dist.get_world_size()):
    number = min(first + rank, len(prompts) - 1)
    image = pipe(prompts[number], height=int(size), width=int(size)).images[0]
    if number == first + rank:
        image.save(f"{number}.png")
        print(f"rank {rank}: {number}.png is {prompts[number]!r}", flush=True)
dist.destroy_process_group()
