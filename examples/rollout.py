"""Reinforcement learning with a driver, as verl and OpenRLHF have it: trainer ranks and a rollout engine.

python rollout.py MODEL STEPS [RANKS]

The driver calls the same method of all trainer ranks, or one of the engine, and gets their results. Each is a
process that could be an actor of Ray: nothing of zerostart goes through the driver but two method calls.
"""

import multiprocessing
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import transformers

import zerostart
from zerostart import serving


class Trainer:
    """One rank of the policy in training."""

    def __init__(self, rank, ranks, source, folder):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        dist.init_process_group(init_method=f"file://{folder}/trainers", rank=rank, world_size=ranks)
        self.model = zerostart.load(source, engine="fsdp2", progress=False).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.refitter = zerostart.refit(
            self.model, f"unix://{folder}/engine"
        )  # vLLM: its server's http://...

    def step(self, tokens, rewards):
        """A step of REINFORCE on this rank's share of the rollouts."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        logits = self.model(input_ids=tokens).logits[mine, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[mine, 1:, None])[..., 0].sum(-1)
        loss = -((rewards - rewards.mean())[mine] * chosen).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def push(self):
        """Bring the engine to the weights of now; all ranks are called, and none gathers anything."""
        return self.refitter.push().version


class Rollout:
    """The engine: any module with a loader for names and tensors of the checkpoint; vLLM has its own."""

    def __init__(self, source, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source)
        load = self.model.load_state_dict
        receiver = serving.Receiver(self.model, lambda pairs: load(dict(pairs), strict=False))
        self.trainer = serving.Connection(receiver, f"unix://{folder}/engine")

    def follow(self):
        """Take part in a push; gives the version that is served then."""
        return self.trainer.follow()

    def generate(self, prompts):
        """The prompts, with 8 tokens more."""
        how = {"do_sample": True, "min_new_tokens": 8, "max_new_tokens": 8, "pad_token_id": 0}
        return self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)


class Remote:
    """An object in a process of its own."""

    def __init__(self, kind, *arguments):
        self.here, there = spawn.Pipe()
        spawn.Process(target=serve, args=(there, kind, arguments), daemon=True).start()

    def call(self, method, *arguments):
        """Begin a call."""
        self.here.send((method, arguments))

    def result(self):
        """What it gave."""
        return self.here.recv()


def serve(pipe, kind, arguments):
    """The loop of such a process, which ends with the driver."""
    made = kind(*arguments)
    while True:
        method, given = pipe.recv()
        pipe.send(getattr(made, method)(*given))


def everywhere(remotes, method, *arguments):
    """Call a method of all of them at the same time."""
    for remote in remotes:
        remote.call(method, *arguments)
    return [remote.result() for remote in remotes]


spawn = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    source, steps, ranks = sys.argv[1], int(sys.argv[2]), int((*sys.argv, "2")[3])
    with tempfile.TemporaryDirectory() as folder:
        trainers = [Remote(Trainer, rank, ranks, source, folder) for rank in range(ranks)]
        engine = Remote(Rollout, source, folder)
        for step in range(1, steps + 1):
            prompts = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(step))
            (tokens,) = everywhere([engine], "generate", prompts)
            rewards = (tokens[:, 6:] % 7).float().mean(-1)  # yours here
            losses = everywhere(trainers, "step", tokens, rewards)
            for remote, method in [*((trainer, "push") for trainer in trainers), (engine, "follow")]:
                remote.call(method)
            versions = [remote.result() for remote in (*trainers, engine)]
            print(f"step {step} reward {rewards.mean():.3f} loss {losses[0]:.4f}", end=" ")
            print(f"the engine serves version {versions[-1]}", flush=True)
