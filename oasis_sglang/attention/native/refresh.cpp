// Page selection of one layer on the CPU: score every page of every (sequence, KV head), pick the budget's pages, and
// swap the ones that are not resident for the least recently used others. One task per (sequence, KV head).
//
// Plain C interface, called through ctypes; see selector.py for shapes. The torch code in speculative/lookahead.py and
// memory_pool/working_set.py says the same and is the oracle for this file.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int32_t NONE = -1;
constexpr float INF = std::numeric_limits<float>::infinity();

struct BFloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};

struct Args {
    int64_t sequences, kv_heads, group, head_dim;
    int64_t columns;         // of host_pages
    int64_t budget, sink, recent, cap;
    int64_t sequence_pages;  // last dimension of slot_of
    int64_t set_pages;       // W, last dimension of page_of and last_used
    int64_t step;
    float scale;
    const void *q;              // [sequences, kv_heads * group, head_dim]
    const void *summaries;      // [pages * kv_heads, 2 * head_dim] largest, then smallest key
    const int64_t *host_pages;  // [sequences, columns]
    const int64_t *tail;        // [sequences] the page being written; pages before it are candidates
    const int64_t *rows;        // [sequences]
    const int64_t *owned;       // [rows, set_pages] physical pages
    int32_t *slot_of;           // this layer's [rows, kv_heads, sequence_pages]
    int32_t *page_of;           // this layer's [rows, kv_heads, set_pages]
    int32_t *last_used;         // this layer's [rows, kv_heads, set_pages]
    int64_t *attended;          // out [sequences, kv_heads, budget] logical pages, ascending
    int64_t *miss_host;         // out [sequences * kv_heads * budget], packed
    int64_t *miss_head;         // out, packed
    int64_t *miss_device;       // out, packed
    int64_t *missed;            // out [sequences * kv_heads] misses, those left out included
    int64_t *admitted;          // out [sequences * kv_heads]
};

// Quest's bound of q.k over a page, softmaxed over pages, mean over the query heads of this KV head.
template <typename T>
void score(const Args &a, int64_t i, int64_t head, int64_t candidates, std::vector<float> &scores,
           std::vector<float> &bound) {
    const int64_t dim = a.head_dim, heads = a.kv_heads;
    const T *q = static_cast<const T *>(a.q) + (i * heads + head) * a.group * dim;
    const T *summaries = static_cast<const T *>(a.summaries);
    std::vector<float> query(a.group * dim);
    for (int64_t d = 0; d < a.group * dim; ++d) query[d] = static_cast<float>(q[d]);
    bound.resize(a.group * candidates);
    std::vector<float> high(dim), low(dim);
    for (int64_t p = 0; p < candidates; ++p) {
        const T *row = summaries + (a.host_pages[i * a.columns + p] * heads + head) * 2 * dim;
        for (int64_t d = 0; d < dim; ++d) high[d] = static_cast<float>(row[d]);
        for (int64_t d = 0; d < dim; ++d) low[d] = static_cast<float>(row[dim + d]);
        for (int64_t g = 0; g < a.group; ++g) {
            const float *x = query.data() + g * dim;
            float sum = 0;
            for (int64_t d = 0; d < dim; ++d) sum += std::max(x[d] * high[d], x[d] * low[d]);
            bound[g * candidates + p] = sum * a.scale;
        }
    }
    scores.assign(candidates, 0.0f);
    for (int64_t g = 0; g < a.group; ++g) {
        float *b = bound.data() + g * candidates;
        float top = b[0];
        for (int64_t p = 1; p < candidates; ++p) top = std::max(top, b[p]);
        float total = 0;
        for (int64_t p = 0; p < candidates; ++p) total += (b[p] = std::exp(b[p] - top));
        const float share = 1.0f / (total * static_cast<float>(a.group));
        for (int64_t p = 0; p < candidates; ++p) scores[p] += b[p] * share;
    }
}

// The `count` best of `from`, in ascending page order; equal scores prefer the earlier page.
void best(const std::vector<float> &scores, std::vector<int32_t> &from, int64_t count) {
    auto better = [&](int32_t x, int32_t y) { return scores[x] != scores[y] ? scores[x] > scores[y] : x < y; };
    if (static_cast<int64_t>(from.size()) > count) {
        std::nth_element(from.begin(), from.begin() + count, from.end(), better);
        from.resize(count);
    }
    std::sort(from.begin(), from.end());
}

template <typename T>
void task(const Args &a, int64_t i, int64_t head) {
    thread_local std::vector<float> scores, bound;
    thread_local std::vector<int32_t> wanted, misses, victims, resident;
    const int64_t tail = a.tail[i], row = a.rows[i], heads = a.kv_heads, lane = i * heads + head;
    int32_t *slot_of = a.slot_of + (row * heads + head) * a.sequence_pages;
    int32_t *page_of = a.page_of + (row * heads + head) * a.set_pages;
    int32_t *used = a.last_used + (row * heads + head) * a.set_pages;
    const int32_t step = static_cast<int32_t>(a.step);

    score<T>(a, i, head, tail, scores, bound);
    for (int64_t p = 0; p < std::min(a.sink, tail); ++p) scores[p] = INF;
    for (int64_t p = std::max<int64_t>(tail - a.recent, 0); p < tail; ++p) scores[p] = INF;
    wanted.resize(tail);
    for (int64_t p = 0; p < tail; ++p) wanted[p] = static_cast<int32_t>(p);
    best(scores, wanted, a.budget);

    misses.clear();
    for (int32_t p : wanted) {
        if (slot_of[p] == NONE) misses.push_back(p);
        else used[slot_of[p]] = step;
    }
    used[slot_of[tail]] = step;
    a.missed[lane] = static_cast<int64_t>(misses.size());
    if (static_cast<int64_t>(misses.size()) > a.cap) best(scores, misses, a.cap);
    const int64_t count = static_cast<int64_t>(misses.size());
    a.admitted[lane] = count;
    if (count) {
        // Slots used in this step are wanted or the tail; those a row does not own are marked as used later than any.
        victims.clear();
        for (int32_t w = 0; w < a.set_pages; ++w)
            if (used[w] < step) victims.push_back(w);
        auto older = [&](int32_t x, int32_t y) { return used[x] != used[y] ? used[x] < used[y] : x < y; };
        std::partial_sort(victims.begin(), victims.begin() + count, victims.end(), older);
        for (int64_t m = 0; m < count; ++m) {
            const int32_t page = misses[m], slot = victims[m];
            if (page_of[slot] != NONE) slot_of[page_of[slot]] = NONE;
            page_of[slot] = page;
            slot_of[page] = slot;
            used[slot] = step;
            const int64_t out = lane * a.budget + m;
            a.miss_host[out] = a.host_pages[i * a.columns + page];
            a.miss_head[out] = head;
            a.miss_device[out] = a.owned[row * a.set_pages + slot];
        }
    }
    int64_t *attended = a.attended + lane * a.budget;
    if (a.missed[lane] > count) {  // the cap left pages out: attend to the best that are resident
        resident.clear();
        for (int64_t p = 0; p < tail; ++p)
            if (slot_of[p] != NONE) resident.push_back(static_cast<int32_t>(p));
        best(scores, resident, a.budget);
        for (int64_t k = 0; k < a.budget; ++k) used[slot_of[attended[k] = resident[k]]] = step;
    } else {
        for (int64_t k = 0; k < a.budget; ++k) attended[k] = wanted[k];
    }
}

template <typename T>
void run(const Args &a) {
    const int64_t tasks = a.sequences * a.kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t t = 0; t < tasks; ++t) task<T>(a, t / a.kv_heads, t % a.kv_heads);
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16. Returns the misses admitted, packed to the front of the miss arrays.
int64_t oasis_refresh(const Args *args, int32_t dtype) {
    const Args &a = *args;
    if (dtype == 0) run<float>(a);
    else run<BFloat16>(a);
    int64_t total = 0;
    for (int64_t lane = 0; lane < a.sequences * a.kv_heads; ++lane) {
        for (int64_t m = 0; m < a.admitted[lane]; ++m, ++total) {
            const int64_t from = lane * a.budget + m;
            a.miss_host[total] = a.miss_host[from];
            a.miss_head[total] = a.miss_head[from];
            a.miss_device[total] = a.miss_device[from];
        }
    }
    return total;
}

// Copies pieces of `width` bytes for K and the same for V: host rows are K and V back to back, device pools separate.
void oasis_load(int64_t count, int64_t width, const uint8_t *host, const int64_t *host_rows, uint8_t *k, uint8_t *v,
                const int64_t *device_rows) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t *piece = host + host_rows[i] * 2 * width;
        std::memcpy(k + device_rows[i] * width, piece, width);
        std::memcpy(v + device_rows[i] * width, piece + width, width);
    }
}

}
