"""Train on several nodes; after a preemption the same line goes on, on any number of ranks.

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint n0:29400 nodes.py MODEL RUN 1000
"""

import pathlib
import signal
import sys

import torch
import torch.distributed as dist

import zerostart

source, run, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
asked = torch.zeros(())
signal.signal(signal.SIGTERM, lambda *_: asked.fill_(1))  # what torchrun, Slurm and Kubernetes send first
dist.init_process_group()
model = zerostart.load(source, engine="fsdp2").train()
print(zerostart.report(model), flush=True)  # seconds, bytes read, peak memory of this rank
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
step, stop, device = 0, False, next(model.parameters()).device
if (run / "state" / "state.json").exists():  # written last: the state is whole
    step = zerostart.load_state(run / "state", model, optimizer)["step"]
while step < steps and not stop:
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(model.config.vocab_size, (1, 32), generator=draw).to(device)  # your data here
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    dist.all_reduce(stop := asked.to(device, copy=True))  # all ranks stop after the same step
    print(f"rank {dist.get_rank()} step {step} loss {loss.item():.4f}", flush=True)
    if stop or step % 100 == 0 or step == steps:
        zerostart.save_state(run / "state", model, optimizer, extra={"step": step})
if step == steps:
    zerostart.save(model, run / "model")  # plain transformers opens it
dist.destroy_process_group()
