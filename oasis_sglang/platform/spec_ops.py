"""Chain speculation (`--speculative-eagle-topk 1`) in torch: what SGLang does in Triton or CUDA kernels.

A chain of n draft tokens per request is row `[bs, n]`, the first of them the last accepted token. `accept_index` and
`retrieve_index` name positions in the flat `[bs * n]`. The functions take SGLang's arguments, which mark with "out"
what they write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def build_chain(
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    topk: int,
    full_mask: bool,
) -> None:
    """Describe the chain as the tree it is.

    Args:
        seq_lens: `[bs]` tokens before the chain.
        tree_mask: out, bool, flat and all true on entry. Per request `[n, n]`, or with `full_mask`
            `[n, seq_len + n]`: which tokens each draft token sees.
        positions: out, `[bs * n]`.
        retrieve_index, retrieve_next_token: out, `[bs, n]`. (Siblings stay -1, as given: a chain has none.)

    Raises:
        NotImplementedError: topk is not 1.
    """
    if topk != 1:
        raise NotImplementedError(
            f"--speculative-eagle-topk={topk} needs a tree; a CPU host builds chains only, topk 1"
        )
    bs, n = retrieve_index.shape
    column = torch.arange(n)
    positions.copy_((seq_lens.view(-1, 1) + column).flatten())
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    retrieve_next_token.copy_(torch.where(column < n - 1, column + 1, -1).expand(bs, n))
    causal = column <= column.view(-1, 1)
    if not full_mask:
        tree_mask[: bs * n * n] = causal.expand(bs, n, n).flatten()
        return
    start = 0
    for length in seq_lens.tolist():
        block = tree_mask[start : start + n * (length + n)].view(n, length + n)
        block[:, length:] = causal
        start += block.numel()


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept drafts as long as each is what the target says after the one before it.

    Args:
        predicts: out, `[bs * n]` the tokens that the accepted positions lead to. accept_index: out, `[bs, n]`, -1 on
            entry. accept_token_num: out, `[bs]` drafts accepted.
        candidates: `[bs, n]`. target_predict: `[bs, n]` what the target says after each.
    """
    agrees = candidates[:, 1:] == target_predict[:, :-1]
    accepted = agrees.long().cumprod(1).sum(1)
    _write(predicts, accept_index, accept_token_num, accepted, target_predict)


def verify_sampled(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    coins: torch.Tensor,
    last_coins: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """Speculative sampling for drafts that were picked, not drawn: a draft is accepted with the target's probability
    of it (Leviathan et al., arXiv 2211.17192, with a one-point draft distribution), and where one is rejected its
    mass is taken out before the target draws. So with thresholds of 1 the output follows the target.

    Args:
        coins: `[bs, n]`, last_coins: `[bs]`, uniform on [0, 1).
        target_probs: `[bs, n, vocab]`; overwritten.
        threshold_single: accept any draft at least this probable. threshold_acc: divides the acceptance threshold.
    """
    bs, n = candidates.shape
    drafts = candidates[:, 1:].long()
    probability = target_probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    agrees = (coins[:, :-1] < probability / max(threshold_acc, 1e-9)) | (probability >= threshold_single)
    accepted = agrees.long().cumprod(1).sum(1)
    row = torch.arange(bs)
    final = target_probs[row, accepted]
    rejected = accepted < n - 1
    refused = drafts[row[rejected], accepted[rejected]]
    final[rejected.nonzero(as_tuple=True)[0], refused] = 0
    mass = final.cumsum(-1)
    # A coin of nearly 1 must not fall past the last token that has any mass.
    drawn = torch.searchsorted(mass, (last_coins.view(-1, 1) * mass[:, -1:]), right=True).squeeze(-1)
    last = (final > 0).long().cumsum(-1).argmax(-1)
    drawn = torch.minimum(drawn, last)
    says = torch.cat((drafts, drafts.new_zeros(bs, 1)), dim=1)
    says[row, accepted] = drawn
    _write(predicts, accept_index, accept_token_num, accepted, says)


def _write(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    accepted: torch.Tensor,
    says: torch.Tensor,
) -> None:
    bs, n = says.shape
    path = torch.arange(n) <= accepted.view(-1, 1)  # the root and the drafts accepted
    flat = torch.arange(bs * n).view(bs, n)
    accept_index.copy_(torch.where(path, flat, -1)[:, : accept_index.shape[1]])
    predicts.view(bs, n).copy_(torch.where(path, says, 0))
    accept_token_num.copy_(accepted)


def last_accepted(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i] = accept_tokens[i, accept_lens[i] - 1]`."""
    rows = accept_tokens.view(out.shape[0], -1)
    out.copy_(rows.gather(1, accept_lens.view(-1, 1).long() - 1).squeeze(1))


def write_slots(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, slots: torch.Tensor
) -> None:
    """`req_to_token[rows[i], start[i]:end[i]]` gets the next `end[i] - start[i]` of `slots`."""
    lengths = (end - start).long()
    row = rows.long().repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    column = torch.arange(row.numel()) + (start.long() - first).repeat_interleave(lengths)
    req_to_token[row, column] = slots[: row.numel()].to(req_to_token.dtype)


def read_slots(rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
    """`req_to_token[rows[i], start[i]:start[i] + count]` for each i, flat int64."""
    column = start.long().view(-1, 1) + torch.arange(count)
    return req_to_token[rows.long().view(-1, 1), column].flatten().to(torch.int64)


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """`[n, vocab]`: keep the `top_ks[i]` largest of row i, ties with the last included, and scale to 1."""
    count = top_ks.long().clamp(1, probs.shape[-1])
    widest = int(count.max())
    least = probs.topk(widest, dim=-1).values.gather(-1, count.view(-1, 1) - 1)
    kept = probs.masked_fill(probs < least, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """`[n, vocab]`: keep the fewest largest of row i whose sum reaches `top_ps[i]`, and scale to 1."""
    ordered, index = probs.sort(-1, descending=True)
    surplus = ordered.cumsum(-1) - ordered > top_ps.view(-1, 1)
    kept = torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(surplus, 0))
    return kept / kept.sum(-1, keepdim=True)


# -- SGLang's names ---------------------------------------------------------------------------------------------------


def cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """`SRTPlatform.get_speculative_cache_locs_fn`: the slots a step writes, `draft_token_num` for each request."""
    return read_slots(req_pool_indices, req_to_token, start_offset, draft_token_num)


def around_build_tree(
    original: Any,
    parent_list: Any,
    top_scores_index: Any,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    build_chain(
        seq_lens, tree_mask, positions, retrieve_index, retrieve_next_token, topk, tree_mask_mode.name == "FULL_MASK"
    )


def around_verify_greedy(
    original: Any,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    verify_greedy(predicts, accept_index, accept_token_num, candidates, target_predict)
    return predicts, accept_index, accept_token_num


def around_fill_bonus(
    original: Any,
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    last_accepted(accept_tokens, accept_lens, bonus_tokens)


def around_assign_rows(
    original: Any,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    write_slots(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)


def around_draft_cache_locs(
    original: Any,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    out_cache_loc.copy_(read_slots(req_pool_indices, req_to_token, seq_lens, topk * num_cols))


def tree_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: Any,  # codespell:ignore (SGLang's spelling)
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    verify_sampled(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        threshold_single,
        threshold_acc,
    )


def around_get_last_loc(
    original: Any, req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    result: torch.Tensor = get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    return result


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func": around_build_tree,
    "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func": around_verify_greedy,
    "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func": around_fill_bonus,
    "sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func": around_draft_cache_locs,
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": around_assign_rows,
    "sglang.srt.mem_cache.allocation.get_last_loc": around_get_last_loc,
}

# Names that SGLang leaves None where it has no kernel.
MISSING = {
    "tree_speculative_sampling_target_only": tree_speculative_sampling,
    "top_k_renorm_prob": top_k_renorm,
    "top_p_renorm_prob": top_p_renorm,
}


def on_cpu(path: str) -> Any:
    """Handler of an AROUND hook: ours for tensors on the CPU, else SGLang's."""
    ours: Callable[..., Any] = AROUND[path]

    def handler(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        on_host = all(x.device.type == "cpu" for x in given)
        return ours(original, *args, **kwargs) if on_host else original(*args, **kwargs)

    handler.__name__ = ours.__name__
    return handler


def fill_missing() -> None:
    """Give EAGLE's verification the sampling functions it lacks here."""
    from sglang.srt.speculative import eagle_utils

    for name, function in MISSING.items():
        if getattr(eagle_utils, name) is None:
            setattr(eagle_utils, name, function)
