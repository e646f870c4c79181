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
    #: Function by parameter name. It returns the products that the forward adds to the local parameter.
    added: dict[str, Callable[[], list[Product]]] = field(default_factory=dict)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the index of ``rank``'s first expert, and the index after its last."""
        first = sum(self.counts[:rank])
        return first, first + self.counts[rank]


def shared_experts(module: nn.Module) -> SharedExperts | None:
    """Return how ranks share the experts of ``module``, None if they do not."""
    return vars(module).get(_SHARED)


def expert_modules(model: nn.Module, parallelism: Parallelism) -> dict[nn.Module, dict[str, str]]:
    """Return the expert parameters of each module: full names by local names."""
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
    tensor_group: dist.ProcessGroup | None = None,
) -> None:
    """Run this rank's ``experts`` on the tokens of all ranks of ``group``.

    ``counts`` is the number of experts of each rank. The ranks of ``tensor_group``, a tensor-parallel group,
    send the same tokens. All use the results and gradients of its first rank, since other ranks may round
    differently. ``copies`` divides the gradients of the experts: it is the size of that group, or 1 if the
    engine divides.
    """
    module: Any = experts
    own_forward = module.forward
    run = functools.partial(_run, own_forward) if copies == 1 else _divide_gradients(own_forward, copies)
    rank, size = dist.get_rank(group), len(counts)
    module.num_experts = counts[rank]
    vars(module)[_SHARED] = SharedExperts(counts, rank)
    owner_of = torch.repeat_interleave(torch.arange(size, device="cpu"), torch.tensor(counts, device="cpu"))
    # Index of each rank's first expert, to convert expert indices into local ones of the owner.
    first_of = torch.tensor([0, *accumulate(counts)][:size], device="cpu")

    @functools.cache
    def tables_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # Copy them once: the host waits for a copy of pageable memory.
        return owner_of.to(device), first_of.to(device)

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        with local_parameters(experts):
            tables = tables_on(hidden_states.device)
            return _serve(run, group, tensor_group, tables, hidden_states, top_k_index, top_k_weights)

    module.forward = forward


def _serve(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup,
    tensor_group: dist.ProcessGroup | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts.

    ``hidden_states`` is [tokens, hidden], ``top_k_index`` and ``top_k_weights`` are [tokens, k]. ``tables``
    are the owner of each expert, and the first expert of each owner.
    """
    device, chosen = hidden_states.device, top_k_index.reshape(-1)
    owner_of, first_of = tables
    order = torch.argsort(chosen, stable=True)  # by expert, and so by owner
    experts = chosen[order]
    owners = owner_of[experts]
    # Not ``bincount``: the host would wait for the size of its result.
    send = torch.zeros_like(first_of).scatter_add_(0, owners, torch.ones_like(owners))
    receive = torch.empty_like(send)
    # Exchange the counts first, so that each rank can allocate its buffers.
    dist.all_to_all_single(receive, send, group=group)
    outgoing, incoming = torch.stack([send, receive]).tolist()  # the only wait of the host
    exchange: Callable[..., torch.Tensor] = _AllToAll.apply
    from_first: Callable[..., torch.Tensor] = _FromFirst.apply
    # Element p of ``chosen`` belongs to token p // k.
    rows = hidden_states[order // top_k_index.shape[-1]]
    # The rows are equal in ``tensor_group``; their gradients are those of its first rank.
    tokens = exchange(from_first(rows, None, tensor_group), outgoing, incoming, group)
    # Local expert index of each row. It has no gradient, so plain torch.distributed is enough.
    local_experts = experts.new_empty(sum(incoming))
    dist.all_to_all_single(local_experts, experts - first_of[owners], incoming, outgoing, group=group)
    results: torch.Tensor = exchange(run(tokens, local_experts), incoming, outgoing, group)
    # The results are those of the first rank; their gradients do not change.
    results = from_first(results, tensor_group, None)
    # The inverse permutation: from the order of owners to that of tokens.
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=device)
    by_token: torch.Tensor = results[inverse].view(*top_k_index.shape, -1)
    summed = (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _run(
    own_forward: Callable[..., torch.Tensor], tokens: torch.Tensor, local_experts: torch.Tensor
) -> torch.Tensor:
    """Run each token through one local expert."""
    if not len(tokens):
        # This rank received no token: run a row of zeros and drop its result. Parameters then get a gradient
        # of zero, and this rank takes part in the reduction of gradients.
        tokens, local_experts = tokens.sum(dim=0, keepdim=True), local_experts.new_zeros(1)
        return _run(own_forward, tokens, local_experts)[:0]
    weights = torch.ones((len(tokens), 1), dtype=tokens.dtype, device=tokens.device)
    result: torch.Tensor = own_forward(tokens, local_experts.unsqueeze(-1), weights)
    return result


def _divide_gradients(
    own_forward: Callable[..., torch.Tensor], copies: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return ``_run`` with the gradients of the experts' weights divided by ``copies``.

    The gradients of the tokens are not divided: they are multiplied by ``copies`` again.
    """
    scale: Callable[..., torch.Tensor] = _ScaledGradient.apply

    def run(tokens: torch.Tensor, local_experts: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = scale(_run(own_forward, scale(tokens, copies), local_experts), 1 / copies)
        return result

    return run


class _ScaledGradient(torch.autograd.Function):
    """Return the rows unchanged, and multiply their gradient by ``factor``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient * ctx.factor, None


class _FromFirst(torch.autograd.Function):
    """Replace rows, or their gradient, by those of the first rank of a group.

    The forward replaces rows in the group ``values``, the backward gradients in the group ``gradients``. With
    None each rank keeps its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        values: dist.ProcessGroup | None,
        gradients: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return _broadcast_first(rows, values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from_first: Callable[..., torch.Tensor] = _FromFirst.apply
        return from_first(gradient, ctx.gradients, None), None, None


def _broadcast_first(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
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
        ctx.reverse = receive, send, group
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Use ``apply``, so that the gradient itself has a gradient (``create_graph=True``).
        exchange: Callable[..., torch.Tensor] = _AllToAll.apply
        return exchange(gradient, *ctx.reverse), None, None, None


@contextlib.contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Let ``module`` see local tensors, with adapters added, inside the block."""
    shared = shared_experts(module)
    products = {name: make() for name, make in shared.added.items()} if shared else {}
    tensors: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        local = _local(parameter)
        if local is not parameter or name in products:
            tensors[name] = _add_products(local, products.get(name, ()))
    # Python finds plain attributes before parameters. Engines need unchanged parameters during the forward.
    vars(module).update(tensors)
    # Hooks of the caller, such as those of gradient checkpointing, already choose the tensors to save.
    save_all = not products or has_saving_hooks()
    hooks = None if save_all else _recompute_hooks(module, products, tensors)
    try:
        with hooks or contextlib.nullcontext():
            yield
    finally:
        for name in tensors:
            del vars(module)[name]


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _add_products(weight: Any, products: Sequence[Product]) -> Any:
    # Compute in the dtype of the weight, as PEFT does.
    for left, right, alpha in products:
        with torch.autocast(weight.device.type, enabled=False):
            weight = torch.baddbmm(weight, left, right, alpha=alpha)
    return weight


def _recompute_hooks(
    module: nn.Module, products: Mapping[str, Sequence[Product]], tensors: dict[str, Any]
) -> AbstractContextManager[None] | None:
    """Return hooks that compute tensors with adapters again in the backward.

    Without them autograd would keep a second copy of every layer's experts. The hooks save only the name and
    the view of such a tensor. They use the factors of the forward: a step, or a change of the active adapter,
    may come before the backward.
    """
    names = {tensors[name].untyped_storage().data_ptr(): name for name in products if tensors[name].numel()}
    factors = {name: [(a.detach(), b.detach(), alpha) for a, b, alpha in products[name]] for name in products}
    recomputed: dict[str, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr())
        if name is not None:
            return name, tensor.shape, tensor.stride(), tensor.storage_offset()
        # Detach the tensor: a graph node that saves its own result would keep itself alive.
        return tensor.detach() if tensor.grad_fn is not None else tensor

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        name, *view = saved
        if name not in recomputed:
            with torch.no_grad():
                recomputed[name] = _add_products(_local(module._parameters[name]), factors[name])
        return recomputed[name].as_strided(*view)

    for name in products:
        if tensors[name].requires_grad:
            # Free the copies when a gradient is complete, which is after the last use of its tensor.
            tensors[name].register_hook(lambda _: recomputed.clear())
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if products else None
