"""Experts on other ranks: send tokens to the owners of their experts and back.

Each (token, expert) pair is sent to the rank that owns the expert, which runs the module's own forward. The
results are sent back, weighted and summed. Autograd follows both all-to-alls. This is the exchange of GShard
(Lepikhin et al., 2020, section 3.2) without a capacity limit: no token is dropped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.geometry.layout import Parallelism
from zerostart.upstream.torch.tensors import has_saving_hooks

_SHARED = "_zerostart_shared_experts"
#: ``alpha * left @ right`` for each expert: left [experts, rows, r], right [experts, r, columns], alpha.
Product = tuple[torch.Tensor, torch.Tensor, float]


@dataclass(frozen=True)
class SharedExperts:
    """The experts of one module that the ranks of a group share."""

    #: Number of experts of each rank.
    counts: Sequence[int]
    #: This rank's number in the group.
    rank: int
    #: By parameter name: a function that returns the products that a forward adds to the local parameter.
    added: dict[str, Callable[[], list[Product]]] = field(default_factory=dict)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the index of the first expert of ``rank``, and the index after its last."""
        first = sum(self.counts[:rank])
        return first, first + self.counts[rank]


def shared_experts(module: nn.Module) -> SharedExperts | None:
    """Return how ranks share the experts of ``module``, None if they do not."""
    return vars(module).get(_SHARED)


def expert_modules(model: nn.Module, parallelism: Parallelism) -> dict[nn.Module, dict[str, str]]:
    """Map each module with experts to the local and full names of its cut parameters."""
    modules: dict[nn.Module, dict[str, str]] = {}
    for prefix, module in model.named_modules():
        own = {
            leaf: name
            for leaf in module._parameters
            if parallelism.is_expert(name := f"{prefix}.{leaf}" if prefix else leaf)
        }
        if own:
            modules[module] = own
    return modules


def exchange_tokens(
    experts: nn.Module,
    group: dist.ProcessGroup,
    counts: Sequence[int],
    copies: int = 1,
    alike: dist.ProcessGroup | None = None,
) -> None:
    """Make ``experts``, with this rank's experts, serve the tokens of all ranks of ``group``.

    ``counts`` is the number of experts of each rank. Ranks that share tensors send the same tokens. ``alike``
    is their group: all use the results and gradients of its first rank, since other ranks may round
    differently. ``copies`` divides the gradients of the experts: the number of such ranks, or 1 if the engine
    divides.
    """
    module: Any = experts
    own_forward = module.forward
    run = functools.partial(_run, own_forward) if copies == 1 else _dividing(own_forward, copies)
    rank, size = dist.get_rank(group), len(counts)
    module.num_experts = counts[rank]
    vars(module)[_SHARED] = SharedExperts(counts, rank)
    owner = torch.repeat_interleave(torch.arange(size, device="cpu"), torch.tensor(counts, device="cpu"))
    # Index of each rank's first expert, to convert expert numbers into the owner's local numbers.
    first = torch.tensor([0, *accumulate(counts)][:size], device="cpu")

    @functools.cache
    def owners(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tables on ``device``, copied once: the host waits for a copy of pageable memory."""
        return owner.to(device), first.to(device)

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        with local_parameters(experts):
            return _serve(
                run, group, alike, owners(hidden_states.device), hidden_states, top_k_index, top_k_weights
            )

    module.forward = forward


def _serve(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup,
    alike: dist.ProcessGroup | None,
    owners: tuple[torch.Tensor, torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run ``hidden_states`` [tokens, hidden] through the experts ``top_k_index`` [tokens, k], weighted."""
    device, chosen = hidden_states.device, top_k_index.reshape(-1)
    owner, first = owners
    order = torch.argsort(chosen, stable=True)  # by expert, and so by owner
    pairs = chosen[order]
    to = owner[pairs]
    # Not ``bincount``: the host would wait for the size of its result.
    send = torch.zeros_like(first).scatter_add_(0, to, torch.ones_like(to))
    receive = torch.empty_like(send)
    # Exchange the counts first, so that each rank can allocate its buffers.
    dist.all_to_all_single(receive, send, group=group)
    outgoing, incoming = torch.stack([send, receive]).tolist()  # the only wait of the host
    travel: Callable[..., torch.Tensor] = _AllToAll.apply
    same: Callable[..., torch.Tensor] = _Same.apply
    # Pair p belongs to token p // k.
    rows = hidden_states[order // top_k_index.shape[-1]]
    # The forward changes nothing, since all of ``alike`` send the same. The backward uses the gradient of the
    # first rank.
    tokens = travel(same(rows, None, alike), outgoing, incoming, group)
    numbers = pairs.new_empty(sum(incoming))
    # Local expert number of each row; it has no gradient, so plain torch.distributed is enough.
    dist.all_to_all_single(numbers, pairs - first[to], incoming, outgoing, group=group)
    # The forward uses the first rank's results; the backward changes nothing.
    results: torch.Tensor = same(travel(run(tokens, numbers), incoming, outgoing, group), alike, None)
    back = torch.empty_like(order)
    # The inverse permutation: from the order of owners to that of tokens.
    back[order] = torch.arange(len(order), device=device)
    by_token: torch.Tensor = results[back].view(*top_k_index.shape, -1)
    summed = (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _run(
    own_forward: Callable[..., torch.Tensor], tokens: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    if not len(tokens):
        # No token came: run a row of zeros and drop its result. Parameters then get a gradient of zero, and
        # this rank takes part in the reduction of gradients.
        tokens, numbers = tokens.sum(dim=0, keepdim=True), numbers.new_zeros(1)
        return _run(own_forward, tokens, numbers)[:0]
    weights = torch.ones((len(tokens), 1), dtype=tokens.dtype, device=tokens.device)
    result: torch.Tensor = own_forward(tokens, numbers.unsqueeze(-1), weights)
    return result


def _dividing(
    own_forward: Callable[..., torch.Tensor], copies: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Divide the gradients of the experts' weights by ``copies``; leave those of the tokens as they are."""
    scaled: Callable[..., torch.Tensor] = _Scaled.apply

    def run(tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = scaled(_run(own_forward, scaled(tokens, copies), numbers), 1 / copies)
        return result

    return run


class _Scaled(torch.autograd.Function):
    """Return the rows unchanged, and multiply their gradient by ``factor``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient * ctx.factor, None


class _Same(torch.autograd.Function):
    """Use the first rank's rows in the forward, and the first rank's gradient in the backward.

    ``values`` and ``gradients`` are the groups; None instead of a group keeps the rank's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        values: dist.ProcessGroup | None,
        gradients: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return _of_first(rows, values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        same: Callable[..., torch.Tensor] = _Same.apply
        return same(gradient, ctx.gradients, None), None, None


def _of_first(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None:
        return rows.view_as(rows)
    copy = rows.clone(memory_format=torch.contiguous_format)
    dist.broadcast(copy, group=group, group_src=0)
    return copy


class _AllToAll(torch.autograd.Function):
    """Send ``send[r]`` rows to rank r of a group; the backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way_back = receive, send, group
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Autograd also follows ``apply``, for ``create_graph=True``.
        travel: Callable[..., torch.Tensor] = _AllToAll.apply
        return travel(gradient, *ctx.way_back), None, None, None


@contextlib.contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Let ``module`` see local tensors instead of DTensors inside the block, adapters added."""
    shared = shared_experts(module)
    products = {name: make() for name, make in shared.added.items()} if shared else {}
    tensors: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        local = _local(parameter)
        if local is not parameter or name in products:
            tensors[name] = _add(local, products.get(name, ()))
    # Python finds plain attributes before parameters. Engines need the parameters unchanged in the forward.
    vars(module).update(tensors)
    # Hooks from outside, such as gradient checkpointing's, already decide what the backward keeps.
    hooks = None if has_saving_hooks() else _recompute(module, products, tensors)
    try:
        with hooks or contextlib.nullcontext():
            yield
    finally:
        for name in tensors:
            del vars(module)[name]


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _add(weight: Any, products: Sequence[Product]) -> Any:
    # Like PEFT, compute in the dtype of the weight.
    for left, right, alpha in products:
        with torch.autocast(weight.device.type, enabled=False):
            weight = torch.baddbmm(weight, left, right, alpha=alpha)
    return weight


def _recompute(
    module: nn.Module, products: Mapping[str, Sequence[Product]], tensors: dict[str, Any]
) -> AbstractContextManager[None] | None:
    """Return hooks that save the name of a tensor with adapters, and compute it again in the backward.

    Otherwise autograd would keep a second copy of every layer's experts. The factors are those of the
    forward: a step, or a change of the active adapter, may come before the backward.
    """
    names = {tensors[name].untyped_storage().data_ptr(): name for name in products if tensors[name].numel()}
    factors = {name: [(a.detach(), b.detach(), alpha) for a, b, alpha in products[name]] for name in products}
    again: dict[str, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr())
        if name is not None:
            return name, tensor.shape, tensor.stride(), tensor.storage_offset()
        # Detach it: a graph node that saves its own result would keep itself alive.
        return tensor.detach() if tensor.grad_fn is not None else tensor

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        name, *place = saved
        if name not in again:
            with torch.no_grad():
                again[name] = _add(_local(module._parameters[name]), factors[name])
        return again[name].as_strided(*place)

    for name in products:
        if tensors[name].requires_grad:
            # A gradient is complete only after the last use of its tensor: free the copies then.
            tensors[name].register_hook(lambda _: again.clear())
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if products else None
