"""The lines that random converters are made of, as text.

Each line has the least number of dimensions of the tensor ``{x}`` that it is about, what its elements are
(any, real or complex), and the text. ``{v}`` is the name of a new tensor; what else may be in braces is in
``program_lines.fill``. Lines that eager torch has an error with are left out of a program, so a text need not
fit every tensor.

Arithmetic here is such that its bits do not depend on how elements are grouped: sums, products, casts and
comparisons of real numbers, and sums of complex ones. ``ARITHMETIC`` is the place for more.
"""

ARITHMETIC = """
0 real {v} = {x} + 1
0 real {v} = {x} * 2
0 real {v} = {x} - {y}
0 real {v} = {x} + {y}
0 real {v} = -{x}
0 real {v} = {x}.abs()
0 real {v} = {x} * {x}
0 real {v} = 1 - {x}
0 real {v} = torch.where({x} > 0, {x}, -0.25)
0 real {v} = torch.maximum({x}, {y})
0 real {v} = {x}.clamp(-1, 1)
0 real {v} = F.relu({x})
0 real {v} = {x}.sign()
0 real {v} = ({x} >= {y}).to({x}.dtype)
0 real {v} = {x}.masked_fill({x} > 1, 0)
0 real {v} = torch.add({x}, {y}, alpha=2)
0 real {v} = {x} / 4
0 real {v} = {x}.half() * 0.5
0 real {v} = torch.sub({x}, 3)
0 real {v} = {x}.to(torch.float64) + {y}
0 real {v} = torch.neg({x})
0 real {v} = {x}.mul(2).add(1)
0 real {v} = {x}.float().sub({y}).to({x}.dtype)
"""

#: Other views of the same memory.
VIEWS = """
1 any {v} = {x}[{part}]
1 any {v} = {x}.transpose({d}, {e})
1 any {v} = {x}.permute({order})
1 any {v} = {x}.T
2 any {v} = {x}.mT
0 any {v} = {x}.reshape({shape})
0 any {v} = {x}.view({shape})
0 any {v} = {x}.flatten()
0 any {v} = {x}.unsqueeze({d})
0 any {v} = {x}.squeeze()
1 any {v} = {x}.narrow({d}, {i}, {length})
1 any {v} = {x}.select({d}, {i})
1 any {v} = {x}.chunk({n}, {d})[-1]
1 any {v} = {x}.split({n}, {d})[0]
1 any {v} = {x}.unbind({d})[{i}]
0 any {v} = {x}.unsqueeze(0).expand({n}, *{x}.shape)
0 any {v} = {x}.detach()
0 any {v} = {x}[None]
0 any {v} = {x}.view(-1)
0 any {v} = {x}.view_as({z})
0 any {v} = {x}.expand_as({z})
1 any {v} = {x}.movedim({d}, {e})
1 any {v} = {x}.swapaxes({d}, {e})
1 any {v} = {x}.unflatten(0, ({heads}, -1))
0 any {v} = torch.ravel({x})
0 any {v} = {x}.data
0 any {v} = copy.copy({x})
1 any {v} = torch.tensor_split({x}, 2, {d})[0]
0 any {v} = {x}.broadcast_to({n}, *{x}.shape)
2 any {v} = {x}.mT.contiguous()
2 any {v} = einops.rearrange({x}, 'a b -> b a')
1 any {v} = einops.rearrange({x}, '(h a) ... -> a h ...', h={heads})
0 real {v} = {x}.view({dtype})
1 any {v} = {x}.squeeze({d})
1 any {v} = {x}.clone().T
1 any {v} = {x}.split([{i}, {size} - {i}], {d})[1]
2 any {v} = {x}.permute({order}).clone()
"""

#: Conjugates, real and imaginary parts.
COMPLEX = """
0 complex {v} = {x}.conj()
2 complex {v} = {x}.mH
2 complex {v} = {x}.adjoint()
0 complex {v} = {x}.real
0 complex {v} = {x}.imag
0 complex {v} = {x}.conj().imag
0 complex {v} = {x}.resolve_conj()
0 complex {v} = torch.view_as_real({x})
0 complex {v} = {x}.conj().resolve_conj()
0 complex {v} = {x}.conj_physical()
0 complex {v} = {x} + {x}.conj()
0 complex {v} = 1 + {x}.conj()
0 complex {v} = {x}.imag.resolve_neg()
0 complex {v} = torch.view_as_real({x}.resolve_conj())
0 complex {v} = {x}.H
0 real {v} = torch.view_as_complex({x}.reshape(-1, 2).float())
0 real {v} = torch.complex({x}.float(), {x}.float() + 1)
0 complex {x}.conj_physical_()
0 complex {x}.imag[...] = 0.5
0 complex {x}.conj().copy_({x} + 1)
"""

#: New tensors.
NEW = """
0 any {v} = {x}.clone()
0 any {v} = {x}.contiguous()
0 any {v} = {x}.clone(memory_format=torch.contiguous_format)
0 any {v} = {x}.repeat({n}, *[1] * {x}.dim())
1 any {v} = {x}.repeat_interleave({n}, {d})
1 any {v} = {x}.tile({n})
1 any {v} = {x}.flip({d})
1 any {v} = {x}.roll({n}, {d})
2 any {v} = torch.rot90({x})
1 any {v} = F.pad({x}, (1, {n}))
1 any {v} = {x}[{first}]
1 any {v} = {x}.index_select({d}, torch.tensor({rows}))
2 any {v} = {x}[:, [0, -1]]
1 any {v} = {x}[torch.tensor({first})]
1 any {v} = {x}[np.array({first})]
1 any {v} = {x}[torch.arange({x}.shape[0]) % 2 == 0]
1 any {v} = {x}.take_along_dim(torch.zeros_like({x}, dtype=torch.long), {d})
2 any {v} = {x}.tril()
2 any {v} = {x}.triu(1)
1 any {v} = {x}.gather({d}, torch.zeros({x}.shape, dtype=torch.long))
1 any {v} = torch.take({x}, torch.tensor([0, 1]))
0 any {v} = copy.deepcopy({x})
2 any {v} = torch.block_diag({x}, {x})
1 any {v} = torch.diag_embed({x})
0 any {v} = {x}.to({dtype})
0 any {v} = {x}.to({dtype}).to({x}.dtype)
0 real {v} = {x}.float()
0 real {v} = {x}.type_as({y})
0 real {v} = {x}.half().float()
0 real {v} = {x}.to(torch.bfloat16).to(torch.float32)
0 any {v} = {x}.to({x}.dtype, copy=True)
0 any {v} = einops.repeat({x}, '... -> r ...', r={n})
1 any {v} = torch.stack({x}.unbind({d}), {e})
1 any {v} = torch.cat({x}.chunk(2, {d})[::-1], {d})
1 real {v} = {x} + torch.arange({x}.shape[-1])
1 any {v} = {x}[torch.tensor([True, False] * {size})[:{x}.shape[0]]]
0 real {v} = torch.from_numpy(np.arange({x}.numel(), dtype=np.float32)).view({x}.shape) * {x}
0 real {v} = {x}.nan_to_num()
1 any {v} = {x}[{x}.shape[0] // 2 :].clone()
0 real {v} = torch.tensor(2.0) * {x}
1 any {v} = {x}.contiguous().view(-1)[{i}:]
2 any {v} = torch.stack([{x}[::2], {x}[1::2]], 1).flatten(0, 1)
2 any {v} = {x}.view({heads}, -1, 1, {x}.shape[-1]).transpose(1, 2).reshape({x}.shape)
2 any {v} = {x}[torch.tensor([[0], [1]]), torch.tensor([0, 1])]
1 any {v} = torch.stack([r + 1 for r in {x}])
1 any {v} = torch.cat([r.reshape(-1) for r in {x}.unbind({d})][::-1])
1 any {v} = {x}.new_tensor([1, 2, 3])
1 any {v} = torch.zeros_like({x}, dtype=torch.float32)
1 any {v} = torch.concat([{x}, torch.zeros_like({x})], {d})
2 any {v} = {x}.swapdims({d}, {e}).contiguous().view(-1)
1 any {v} = {x}.index_select(0, torch.from_numpy(np.array({first})))
1 any {v} = {x}[torch.arange({x}.shape[0] - 1, -1, -1)]
1 any {v} = {x}[torch.arange({x}.shape[0]).numpy()[::-1].copy()]
1 any {v} = {x}[sorted(torch.tensor({first}).tolist())]
"""

#: Writes into tensors, and into views of them.
WRITES = """
0 real {x}.mul_(2)
0 any {x}.add_({y})
0 any {x}.sub_(1)
0 real {x} *= 2
0 any {x}.copy_({y})
0 real {x}.neg_()
0 any {x}.fill_({number})
0 real {x}.masked_fill_({x} > 0, 1)
1 any {x}.masked_fill_(torch.arange({x}.shape[-1]) > 1, 0)
1 any {x}[torch.tensor({first})] = {number}
1 any {x}[{first}[:1]] = {x}[:1]
1 any {x}[torch.arange({x}.shape[0]) % 2 == 0] = 1
1 any {x}.index_copy_({d}, torch.tensor([{i}]), {x}.narrow({d}, 0, 1))
1 any {x}.index_fill_({d}, torch.tensor([{i}]), 2)
1 any {x}.index_put_((torch.tensor([{i} % {x}.shape[0]]),), {x}[0])
1 any {x}.index_add_({d}, torch.tensor([{i}]), {x}.narrow({d}, 0, 1))
1 any {x}.scatter_({d}, torch.zeros({x}.narrow({d}, 0, 1).shape, dtype=int), {x}.narrow({d}, -1, 1).clone())
1 any {x}.scatter_({d}, torch.zeros([1] * {x}.dim(), dtype=torch.long), 2)
2 any {x}.t_()
1 any {x}.transpose_({d}, {e})
0 any {x}.unsqueeze_(0)
0 any {x}.squeeze_()
0 any torch.add({x}, {y}, out={x})
0 real {x}.clamp_(-1, 1)
0 any {x}.data = {z}.data
2 any {x}.tril_()
0 real torch.mul({x}, 2, out={z})
1 any torch.cat([{x}, {x}], out=torch.empty(0, dtype={x}.dtype))
0 real torch._foreach_mul_([{x}], 2)
1 any {x}[0], {x}[1] = {x}[1].clone(), {x}[0].clone()
1 any {x}[:2] = {x}[2:4]
1 any {x}[...] = {x}.flip(0)
0 real {x}.abs_()
1 any {x}.copy_({x}.T.contiguous().view({x}.shape))
0 any {x}.view(-1)[{i}:].zero_()
1 any {v} = {x}.clone(); {v}[: {v}.shape[0] // 2] = {v}[{v}.shape[0] // 2 :][: {v}.shape[0] // 2]
0 real torch.Tensor.mul_({x}, 2)
0 any {x}.masked_scatter_(torch.ones({x}.shape, dtype=torch.bool), {x}.clone())
1 any [r.fill_(i) for i, r in enumerate({x})]
1 any [r.add_(1) for r in {x}.unbind({d})]
1 any {v} = torch.zeros({x}.shape, dtype={x}.dtype); [{v}[i].copy_({x}[-1 - i]) for i in range({x}.shape[0])]
2 any {x}[torch.tensor([0, 1]), torch.tensor([1, 0])] = {number}
2 any {x}[:, [0, -1]] = {number}
1 any {x}[{part}].data.zero_()
1 any {v} = {x}.clone(); {v}[{part}] = {number}
1 any {x}[::2], {x}[1::2] = 0, 1
1 any {v} = {x}.detach(); {v}.requires_grad_(False); {v}[0] = 2
1 any {v} = torch.nn.Parameter({x}, requires_grad=False); {v}.data[0] = {number}
"""

#: Converters that ask how a tensor lies in memory.
BRANCHES = """
0 real {v} = {x} + 1 if {x}.is_contiguous() else {x} - 1
0 any {v} = {x}.view(-1) if {x}.is_contiguous() else {x}.reshape(-1).flip(0)
1 any {v} = {x}[0] if {x}.stride(0) == 1 else {x}[-1]
0 real {v} = {x} * 2 if {x}.storage_offset() else {x} * 3
2 any {v} = {x}.T if {x}.T.is_contiguous() else {x}
0 any {v} = {x}.clone() if {x}.is_set_to({z}) else {x}[None]
0 any {v} = {x} if {x}.is_conj() else {x}.flatten()
0 any {v} = {x}.contiguous() if {x}._is_view() else {x}
1 any {v} = {x}.flatten()[{x}.stride(-1) - 1 :][:3]
1 any {v} = {x}.view(-1)[:2] if {x}.contiguous() is {x} else {x}.reshape(-1)[-2:]
4 any {v} = {x}.to({x}.dtype) if {x}.is_contiguous(memory_format=torch.channels_last) else {x}.flip(0)
"""

#: What asks for the values of weights, or for their memory.
READS = """
1 any {v} = torch.from_numpy({x}.numpy().copy())
1 any {v} = torch.tensor(np.asarray({x}))
1 any {v} = {x} + {x}.sum().item()
1 any {v} = {x} * (1 + {x}.data_ptr() % 2)
1 any {v} = torch.tensor({x}.tolist())
1 any {v} = torch.from_dlpack({x}) + 1
1 any {v} = {x} if {x}.data_ptr() == {z}.data_ptr() else {x} + 1
1 any {v} = {x}[{x} > 0]
1 any {v} = {x} + float({x}.flatten()[0])
1 any {v} = {x} * len({x}.untyped_storage())
1 any {v} = {x} if bool(({x} > 0).any()) else -{x}
1 any {v} = torch.tensor(np.array({x}))
1 any {v} = torch.Tensor.numpy({x}); {v} = torch.tensor({v})
1 any {v} = torch.from_numpy(np.from_dlpack({x}).copy())
1 any {v} = {x}.nonzero()
1 any {v} = {x} + int({x}.storage().data_ptr() > 0)
1 any {v} = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack({x}))
1 any {v} = {x} + torch.Tensor.data_ptr({x}) % 7
1 any {v} = {x} if torch.equal({x}, {z}) else {x} * 2
1 any b = np.zeros(tuple({x}.shape), np.float32); torch.from_numpy(b).copy_({x}); {v} = torch.tensor(b)
"""
