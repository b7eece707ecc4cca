"""Every kernel against what it must compute: the torch operations of a CPU host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import gpu_check_memory, gpu_check_pages, gpu_check_place
from benchmarks.gpu_implementations import TRITON, Attend, implementations
from benchmarks.gpu_scale import Scale, scale_of
from benchmarks.gpu_stage import Item
from benchmarks.gpu_verdict import both, near
from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.kernels.attend import FP8, attend
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.variants import Shape

# Of the largest value. float32 is multiplied as three products of TensorFloat-32; outputs and weights in 16 bits are
# rounded to 8 or 11 bits.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
NOWHERE = -(1 << 40)


def items(tiny: bool) -> list[Item]:
    scale = scale_of(tiny)
    found = [Item(f"attend {_name(case)}", 6.0, partial(check_attend, scale, case)) for case in scale.attend_cases]
    for name, other in implementations(scale).items():
        if name != TRITON:
            for at, case in enumerate(_worked(scale)):  # the first of them waits for a compiler
                run = partial(check_implementation, scale, case, name, other)
                found.append(Item(f"attend {name} {_name(case)}", 3.0 if at else 60.0, run))
    found.append(Item("prefill", 3.0, partial(check_prefill, scale)))
    return [*found, *gpu_check_pages.items(scale), *gpu_check_memory.items(scale), *gpu_check_place.items(scale)]


def _name(case: Shape) -> str:
    kv, dim, page, group, t, batch = case
    return f"{str(kv)[6:]} D={dim} P={page} G={group} t={t} n={batch}"


def _worked(scale: Scale) -> list[Shape]:
    """Decode steps and verified chains of the worked shape's dtype and head dim: more would compile for minutes."""
    group = scale.query_heads // scale.kv_heads
    sizes = ((1, scale.sequences), (1, 3), (4, 3), (8, scale.sequences))
    return [(scale.dtype, scale.head_dim, scale.page, group, t, n) for t, n in sizes]


class AttendCase:
    """Page tables of random rows of a pool that is NaN wherever no token is; row 0 is the reserved page's."""

    def __init__(self, scale: Scale, case: Shape) -> None:
        kv, dim, page, group, t, batch = case
        device, heads = scale.device, scale.kv_heads
        random = torch.Generator(device).manual_seed(1)
        columns = scale.budget // page + 2
        tokens = torch.randint(t, columns * page + 1, (batch,), generator=random, device=device)
        tokens[0] = columns * page
        if batch > 2:  # an empty row, and one that holds its query tokens alone
            tokens[1:3] = torch.tensor([0, t])
        pieces = batch * heads * columns
        table = (torch.randperm(pieces, generator=random, device=device) + 1).view(batch, heads, columns)
        lane = torch.arange(columns * page, device=device).view(columns, page)
        holds = torch.zeros(pieces + 1, page, dtype=torch.bool, device=device)
        holds[table] = (lane < tokens.view(-1, 1, 1)).unsqueeze(1).expand(-1, heads, -1, -1)
        holds[0] = True

        def pool() -> torch.Tensor:
            x = torch.randn(pieces + 1, page, dim, generator=random, device=device)
            return x.masked_fill_(~holds.unsqueeze(-1), torch.nan).to(kv).flatten(1)

        self.k, self.v, self.page, self.tokens = pool(), pool(), page, tokens
        self.scales = (0.5, 2.0) if kv == FP8 else (1.0, 1.0)
        past = torch.arange(columns, device=device) >= (-(-tokens // page)).view(-1, 1, 1)
        self.table = table.masked_fill(past, NOWHERE)
        self.safe_table = table.masked_fill(past, 0)
        dtype = torch.bfloat16 if kv == FP8 else kv
        q = torch.randn(batch, t, heads * group, dim, generator=random, device=device)
        self.q = q.to(dtype)
        self.factor = dim**-0.5

    def expected(self) -> torch.Tensor:
        """`[n, t, Hq, D]` float64."""
        keys, values = (x.double() * by for x, by in zip((self.k, self.v), self.scales, strict=True))
        layout = TableLayout(self.tokens, self.table.shape[2], self.page, self.q.shape[1], torch.float64)
        return TorchOps().attend(self.q.double(), keys, values, self.safe_table, layout, self.factor)

    def expected_logs(self) -> torch.Tensor:
        """Logarithms of the softmaxes' sums, `[n, t, Hq]` float64, -inf for an empty row."""
        n, t, query_heads, dim = self.q.shape
        heads = self.table.shape[1]
        keys = (self.k.double() * self.scales[0])[self.safe_table].view(n, heads, -1, dim).nan_to_num(0)
        queries = self.q.double().view(n, t, heads, -1, dim)
        logits = torch.einsum("nthgd,nhld->nthgl", queries, keys) * self.factor
        seen = self.tokens.view(-1, 1) - torch.arange(t - 1, -1, -1, device=keys.device)
        hidden = torch.arange(keys.shape[2], device=keys.device) >= seen.view(n, t, 1, 1, 1)
        return logits.masked_fill(hidden, -torch.inf).logsumexp(-1).view(n, t, query_heads)


def check_attend(scale: Scale, case: Shape) -> dict[str, Any]:
    made = AttendCase(scale, case)
    lse = torch.full(made.q.shape[:3], torch.nan, device=scale.device)
    out = torch.full_like(made.q, torch.nan)
    k_scale, v_scale = made.scales
    attend(
        made.q, made.k, made.v, made.table, made.tokens, made.page, made.factor,
        k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
    )  # fmt: skip
    bound = BOUNDS[made.q.dtype]
    verdicts = [near(["attend"], _name(case), out, made.expected(), bound)]
    if made.q.numel() * made.table.numel() < 1 << 30:
        verdicts.append(near(["attend"], f"{_name(case)}, logs", lse, made.expected_logs(), bound))
    return both(*verdicts)


def check_implementation(scale: Scale, case: Shape, name: str, other: Attend) -> dict[str, Any]:
    """What attends beside our kernel: no function of ours, so none is named."""
    made = AttendCase(scale, case)
    call = other(made.q, made.k, made.v, made.table, made.tokens, made.page, made.factor)
    return near([], f"{name} {_name(case)}", call(), made.expected(), BOUNDS[made.q.dtype])


def check_prefill(scale: Scale) -> dict[str, Any]:
    """A chunk of a prompt after a prefix, which torch's own attention computes."""
    random = torch.Generator().manual_seed(2)
    new, prefix, heads, dim = 3 * scale.page, 5 * scale.page + 3, scale.kv_heads, scale.head_dim
    q = torch.randn(new, scale.query_heads, dim, generator=random)
    k, v = (torch.randn(heads, prefix + new, dim, generator=random) for _ in range(2))
    want = TorchOps().prefill(q, k, v, prefix, scale.scale)
    got = TritonOps().prefill(*(x.to(scale.device, scale.dtype) for x in (q, k, v)), prefix, scale.scale)
    return near([], f"{new} tokens after {prefix}", got, want, BOUNDS[scale.dtype])
