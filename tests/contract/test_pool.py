"""Our pool and coordinator under SGLang's real allocator and row pool, with the hooks in place (contracts 3, 4, 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oasis_sglang import arguments, coordinator, plugin
from oasis_sglang.config import OasisConfig
from tests.contract.rank import PAGE, Rank, make_pool, request

pytestmark = pytest.mark.usefixtures("plugged")
CONFIG = OasisConfig(token_budget=64, page_size=PAGE, host_to_device_ratio=1.0)
MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    coordinator.stop()
    yield lambda config=CONFIG, **sizes: Rank(config, **sizes)
    coordinator.stop()


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank()


# -- what is built ----------------------------------------------------------------------------------------------------


def configurator(config: OasisConfig | None, draft: bool) -> Any:
    server_args = SimpleNamespace()
    arguments.attach(server_args, config)
    return SimpleNamespace(server_args=server_args, is_draft_worker=draft)


def test_a_draft_worker_gets_no_tier() -> None:
    """C32, contract 8: the draft's runner shares the process; it must not allocate a second host pool or take the
    target's capacity for its own. Its KV is whole and on the device."""
    from oasis_sglang.memory_pool.draft_pool import OasisDraftPool

    coordinator.stop()
    draft, stock = configurator(CONFIG, draft=True), object()
    assert plugin._resolve_memory_pool_config(lambda *_: stock, draft, 0) is stock
    assert plugin._resolve_kv_pool_class(lambda *_, **__: dict, draft, kind="mha", default=list) is OasisDraftPool
    assert coordinator.active() is None
    with pytest.raises(RuntimeError, match="before its size was planned"):
        coordinator.take_setup()


def test_the_pool_class_is_ours_for_plain_attention_only() -> None:
    """SGLang asks for the class of every kind; ours replaces one of them, and only where the flag was given."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from oasis_sglang.memory_pool.device_pool import OasisKVPool

    resolve = KVCacheConfigurator._resolve_kv_pool_class
    asked = configurator(CONFIG, draft=False)
    assert resolve(asked, kind="mha", default=MHATokenToKVPool) is OasisKVPool
    for other, kind in ((asked, "mla"), (configurator(None, draft=False), "mha"), (configurator(None, True), "mha")):
        stock = plugin._resolve_kv_pool_class(lambda *_, **__: dict, other, kind=kind, default=list)
        assert stock is dict


def test_the_pool_shows_the_host_and_allocates_the_device(rank: Rank) -> None:
    """One id space: SGLang counts host slots, the buffers are device pages in HND order."""
    plan = rank.setup.plan
    assert rank.pool.size == plan.host_tokens == 1600
    assert rank.allocator.available_size() == plan.host_tokens
    assert rank.pool.k_buffer[0].shape == (plan.device_tokens // PAGE + 1, 2, PAGE, 16)
    assert sum(x.nbytes for x in (*rank.pool.k_buffer, *rank.pool.v_buffer)) == plan.device_bytes
    assert rank.tier.host.nbytes == plan.host_bytes
    assert rank.tier.summaries.nbytes == plan.summary_bytes


def test_nothing_is_written_or_moved_by_slot(rank: Rank) -> None:
    """A slot is no index of the buffers: SGLang code that assumes so must fail, not corrupt pages."""
    slots = torch.tensor([3])
    with pytest.raises(RuntimeError, match="written through its attention backend only"):
        rank.pool.set_kv_buffer(rank.layers[0], slots, torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
    with pytest.raises(RuntimeError, match="does not move slots"):
        rank.pool.move_kv_cache(slots, slots)


def test_a_pool_that_was_not_planned_is_refused(rank: Rank) -> None:
    """C31: a pool of another size or shape than was checked against memory must not be built."""
    with pytest.raises(RuntimeError, match="before its size was planned"):
        make_pool(1600)
    coordinator.prepare(rank.setup)
    with pytest.raises(RuntimeError, match="pool of 800 tokens, planned were 1600"):
        make_pool(800)
    coordinator.prepare(rank.setup)
    with pytest.raises(RuntimeError, match="geometry differs"):
        make_pool(1600, layer_num=3)


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_sort", [False, True])
def test_freed_slots_are_forgotten_page_by_page(make_rank: MakeRank, need_sort: bool) -> None:
    """C38, C4: a page that goes back to the allocator holds nothing any more, whichever of its tokens was named; its
    neighbours keep what they hold."""
    rank = make_rank(need_sort=need_sort)
    slots = rank.allocator.alloc(6 * PAGE)
    fill = rank.tier.host.fill
    rank.tier.host.mark_written(slots)
    pages = (slots[::PAGE] // PAGE).tolist()
    rank.allocator.free(slots[2 * PAGE : 3 * PAGE])
    assert fill[pages].tolist() == [PAGE, PAGE, 0, PAGE, PAGE, PAGE]
    rank.allocator.free(torch.cat((slots[PAGE + 3 : PAGE + 4], slots[4 * PAGE : 5 * PAGE])))
    assert fill[pages].tolist() == [PAGE, 0, 0, PAGE, 0, PAGE]
    rank.allocator.free_segment(slots[:PAGE], start_pos=0)
    rank.allocator.free_page_ids(torch.tensor([pages[5]]))
    assert fill[pages].tolist() == [0, 0, 0, PAGE, 0, 0]
    rank.allocator.free(slots[:0])
    assert int(fill.sum()) == PAGE


def test_a_group_of_frees_is_forgotten_at_its_end(rank: Rank) -> None:
    """C38: SGLang collects frees in groups; pages stay readable until the group ends, and none is missed then."""
    slots = rank.allocator.alloc(5 * PAGE)
    rank.tier.host.mark_written(slots)
    fill, pages = rank.tier.host.fill, (slots[::PAGE] // PAGE).tolist()
    rank.allocator.free_group_begin()
    rank.allocator.free(slots[:PAGE])
    rank.allocator.free(slots[PAGE : 2 * PAGE])
    rank.allocator.free_page_ids(torch.tensor([pages[3]]))
    assert fill[pages].tolist() == [PAGE] * 5
    rank.allocator.free_group_end()
    assert fill[pages].tolist() == [0, 0, PAGE, 0, PAGE]
    assert rank.allocator.available_size() == rank.setup.plan.host_tokens - 2 * PAGE


def test_clearing_the_allocator_empties_the_host_pool(rank: Rank) -> None:
    """C40: after /flush_cache nothing of the old cache may be found."""
    rank.tier.host.mark_written(rank.allocator.alloc(3 * PAGE))
    assert rank.coordinator.state()["host_tokens_written"] == 3 * PAGE
    rank.allocator.clear()
    assert rank.coordinator.state()["host_tokens_written"] == 0


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_take_and_give_back_device_pages(rank: Rank) -> None:
    """Contract 4: a request that gets its row gets its pages; finish, abort and retract all end in `free_rows`."""
    sets = rank.tier.sets
    small, large = request(20, 8), request(400, 8)
    assert rank.rows.alloc([small, large]) is not None
    assert sets.owned_pages == 2 + CONFIG.max_set_pages, "29 tokens, and a full working set"
    small.kv.kv_allocated_len = 20
    rank.rows.alloc([small])
    assert sets.requests == 2, "the next chunk of a prompt keeps its row and its pages"
    rows = rank.coordinator.rows(torch.tensor([small.kv.req_pool_idx, large.kv.req_pool_idx]))
    assert rows[0] != rows[1]
    freed = small.kv.req_pool_idx
    rank.rows.free(small)
    assert sets.owned_pages == CONFIG.max_set_pages
    with pytest.raises(RuntimeError, match=rf"rows \[{freed}\] run without having been admitted"):
        rank.coordinator.rows(torch.tensor([freed, large.kv.req_pool_idx]))
    rank.rows.free_rows([large.kv.req_pool_idx])
    rank.coordinator.check_idle()
    rank.coordinator.leave([large.kv.req_pool_idx, 99])
    assert sets.owned_pages == 0


def test_a_retracted_request_counts_what_it_has_written(rank: Rank) -> None:
    """C5: a request that comes back needs room for the output it already has, though its limit may be lower."""
    assert rank.coordinator.pages_needed(request(20, 8)) == 2
    assert rank.coordinator.pages_needed(request(20, 8, output=30)) == 4


def test_clearing_the_rows_releases_everything(rank: Rank) -> None:
    """C40: /flush_cache leaves no working set behind, and rows serve again."""
    rank.rows.alloc([request(30), request(40)])
    rank.rows.clear()
    assert rank.tier.sets.owned_pages == 0
    again = request(50)
    rank.rows.alloc([again])
    assert rank.tier.sets.requests == 1
    rank.coordinator.rows(torch.tensor([again.kv.req_pool_idx]))


def test_no_row_takes_no_pages(rank: Rank) -> None:
    """C10: SGLang has no rows left: `alloc` returns None and nothing is held."""
    assert rank.rows.alloc([request(10) for _ in range(9)]) is None
    assert rank.tier.sets.owned_pages == 0


def test_scheduling_past_admission_is_an_error(make_rank: MakeRank) -> None:
    """C19: a path that skips admission must stop, not decode without pages."""
    config = OasisConfig(token_budget=64, host_to_device_ratio=5)
    rank = make_rank(device_tokens=(CONFIG.max_set_pages + 1) * PAGE, config=config)
    rank.rows.alloc([request(400)])
    with pytest.raises(RuntimeError, match="request-300 was scheduled with 1 device pages free, it needs 7"):
        rank.rows.alloc([request(300)])


# -- admission --------------------------------------------------------------------------------------------------------


def add(rank: Rank, req: Any, promised: list[Any]) -> Any:
    """`PrefillAdder.add_one_req` behind our hook; admits whatever the hook lets through."""
    adder = SimpleNamespace(can_run_list=promised)

    def stock(adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> str:
        adder.can_run_list.append(req)
        return "admitted"

    return plugin._add_one_req(stock, adder, req, False, None)


def test_admission_counts_device_pages(make_rank: MakeRank) -> None:
    """C11, sgl#22453: slots on the host are not room on the device; what the same pass has promised counts too."""
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    rank = make_rank(device_tokens=15 * PAGE, config=OasisConfig(token_budget=64, host_to_device_ratio=4))
    promised: list[Any] = []
    assert [add(rank, request(400), promised) for _ in range(2)] == ["admitted"] * 2  # 7 pages each
    assert add(rank, request(20), promised) is AddReqResult.NO_TOKEN
    assert add(rank, request(3, 4), promised) == "admitted"
    rank.rows.alloc(promised)
    assert rank.tier.sets.free_pages == 0
    refused = PrefillAdder.add_one_req(
        SimpleNamespace(can_run_list=[]), request(1, 1), has_chunked_req=False, truncation_align_size=None
    )
    assert refused is AddReqResult.NO_TOKEN
    running = list(promised)
    rank.rows.free(promised[0])
    # those that have their rows have their pages: they are not counted again
    assert add(rank, request(400), running[1:]) == "admitted"


def test_admission_counts_rows(make_rank: MakeRank) -> None:
    """C10: working sets have rows of their own; a pass must not promise more than there are."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    rank = make_rank(rows=2)
    promised: list[Any] = []
    assert [add(rank, request(5), promised) for _ in range(3)] == ["admitted", "admitted", AddReqResult.NO_TOKEN]


@pytest.mark.parametrize("prompt", [1, 64, 400, 511])
@pytest.mark.parametrize("max_new", [0, 1, 10_000, None])
def test_an_idle_server_admits_any_request(make_rank: MakeRank, prompt: int, max_new: int | None) -> None:
    """C28: the smallest device pool that is accepted at start serves every prompt that the context length allows."""
    config = OasisConfig(token_budget=64, host_to_device_ratio=8)
    rank = make_rank(config=config, device_tokens=(config.max_set_pages + 1) * PAGE)
    req = request(prompt)
    req.sampling_params.max_new_tokens = max_new
    promised: list[Any] = []
    assert add(rank, req, promised) == "admitted"
    assert rank.rows.alloc(promised) is not None


# -- state ------------------------------------------------------------------------------------------------------------


def test_leaks_and_transfers_show_at_idle(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 9: SGLang's idle check runs ours; copies in flight are work, though not a failure of health."""
    rank.rows.alloc([request(30)])
    with pytest.raises(RuntimeError, match="oasis leak: 1 working sets and 3 device pages"):
        plugin._check_req_pool(None, None)
    rank.rows.clear()
    plugin._check_req_pool(None, None)
    stock = lambda *_: True  # noqa: E731
    assert plugin._is_fully_idle(stock, None)
    monkeypatch.setattr(rank.tier.transfer, "in_flight", lambda: 1)
    assert not plugin._is_fully_idle(stock, None)
    assert plugin._is_fully_idle(stock, None, for_health_check=True)
    assert not plugin._is_fully_idle(lambda *_: False, None, for_health_check=True)


def test_beam_search_is_refused_per_request(rank: Rank) -> None:
    """Contract 10: beams share and copy rows, which our pages do not follow; the answer is SGLang's 400."""
    from sglang.srt.beam_search.coordinator import BeamCoordinator

    req = SimpleNamespace(sampling_params=SimpleNamespace(beam_width=4))
    assert "beam_width=4 does not work with --kv-backend oasis" in BeamCoordinator.validate_and_init(None, req, None)


def test_prefix_hits_are_reported_as_host_hits(rank: Rank) -> None:
    """`cached_tokens_details`: what a hit finds is in the host pool."""
    from sglang.srt.managers.schedule_batch import Req

    assert Req.materialized_host_hit_len(SimpleNamespace(prefix_len=48)) == 48
