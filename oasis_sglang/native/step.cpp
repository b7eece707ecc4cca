// The irregular parts of a decode step on the CPU: page selection, copies of page pieces, gathering pages for attention.
//
// Plain C interface, called through ctypes; selector.py, native_ops.py and transfer.py say what the arguments are. The
// torch code beside each call says the same and is the oracle for this file.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef __AVX512F__  // the others imply it
#include <immintrin.h>
#endif

namespace {

constexpr int32_t NONE = -1;
constexpr int64_t PREFETCH = 8;  // pages ahead
constexpr int64_t BLOCK = 4;     // pages scored together
constexpr int64_t LANES = 16;    // a multiple of BLOCK
constexpr float INF = std::numeric_limits<float>::infinity();

struct BFloat16 {
    uint16_t bits;
};

void widen(const float *from, float *to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

void widen(const BFloat16 *from, float *to, int64_t n) {
    auto *out = reinterpret_cast<uint32_t *>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint32_t>(from[i].bits) << 16;
}

// e^x for x <= 0 in a form that compilers vectorise: 2^n times a polynomial on [-0.5, 0.5] (Cephes expf, relative error
// below 2e-7). Arguments below -60 count as -60: a weight of 1e-26 is as good as none, and smaller ones would
// become denormal, which costs a hundred times the time.
inline float exp_of_negative(float x) {
    x = std::max(x, -60.0f);
    const float n = std::nearbyint(x * 1.44269504088896341f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
    float two_to_n;
    std::memcpy(&two_to_n, &power, sizeof two_to_n);
    return y * two_to_n;
}

struct Args {
    int64_t sequences, queries, kv_heads, group, head_dim;
    int64_t columns;         // of host_pages
    int64_t budget, sink, recent, cap;
    int64_t sequence_pages;  // last dimension of slot_of
    int64_t set_pages;       // W, last dimension of page_of and last_used
    int64_t step;
    int64_t page_size;
    int64_t sketch;              // dimensions that key sketches keep (sketch.py), or 0: summaries are bounds
    const int64_t *sketch_dims;  // [sketch]
    float scale;
    const void *q;              // [sequences, queries, kv_heads * group, head_dim]
    const void *summaries;      // [pages * kv_heads, ...] sketches, or 2 * head_dim: largest, then smallest key
    const int64_t *host_pages;  // [sequences, columns]
    const int64_t *tail;        // [sequences] the page being written; pages before it are candidates
    const int64_t *rows;        // [sequences]
    const int64_t *owned;       // [rows, set_pages] device pages
    const int64_t *cells;       // this layer's [device pages, kv_heads] pool rows
    int32_t *slot_of;           // this layer's [rows, kv_heads, sequence_pages]
    int32_t *page_of;           // this layer's [rows, kv_heads, set_pages]
    int32_t *last_used;         // this layer's [rows, kv_heads, set_pages]
    int64_t *attended;          // out [sequences, kv_heads, budget] logical pages, the least wanted last
    int64_t *table;             // out, or null: page table [?, kv_heads, table_columns] of pool rows
    const int64_t *at;          // [sequences] which row of `table` is whose
    int64_t table_columns;
    int64_t *misses;            // out [MISS_FIELDS, miss_stride], `budget` for each lane, of which `admitted` are there
    int64_t *missed;            // out [sequences * kv_heads] misses, those left out included
    int64_t *admitted;          // out [sequences * kv_heads]
    int64_t miss_stride;
};

// Of each miss: host page, KV head, pool row, sequence, slot, logical page, and the page that was in the slot or NONE.
constexpr int64_t MISS_FIELDS = 7;

// What one thread works in; kept between calls. Functions get it as an argument, since each use of a thread_local's name
// is a call.
template <typename T>
struct Scratch {
    std::vector<T> split;
    std::vector<int8_t> codes;
    std::vector<float> factors, bound, scores;
    std::vector<uint32_t> bits;
    std::vector<int32_t> wanted, misses, victims, resident;
};

// Page selection: score every page of every (sequence, KV head), pick the budget's pages, and swap the ones that are not
// resident for the least recently used others. One task per (sequence, KV head).

inline float value(float x) { return x; }

inline float value(BFloat16 x) {
    float y;
    widen(&x, &y, 1);
    return y;
}

// BLOCK dot products: of `x` with each of `rows`, all `width` long.
template <typename T>
void dots(const T *x, const T *const *rows, int64_t width, float *out) {
    for (int64_t j = 0; j < BLOCK; ++j) {
        float sum = 0;
        for (int64_t d = 0; d < width; ++d) sum += value(x[d]) * value(rows[j][d]);
        out[j] = sum;
    }
}

#ifdef __AVX512BF16__

// Products of bfloat16 are exact in float32, so this differs from the loop above only in the order of the sum.
template <>
void dots(const BFloat16 *x, const BFloat16 *const *rows, int64_t width, float *out) {
    static_assert(BLOCK == 4);
    __m512 sum[BLOCK];
    for (__m512 &each : sum) each = _mm512_setzero_ps();
    for (int64_t d = 0; d < width; d += 32) {
        const __mmask32 used = width - d >= 32 ? ~0u : (1u << (width - d)) - 1;
        const auto left = (__m512bh)_mm512_maskz_loadu_epi16(used, x + d);
        for (int64_t j = 0; j < BLOCK; ++j) {
            sum[j] = _mm512_dpbf16_ps(sum[j], left, (__m512bh)_mm512_maskz_loadu_epi16(used, rows[j] + d));
        }
    }
    __m256 half[BLOCK];
    for (int64_t j = 0; j < BLOCK; ++j) {
        half[j] = _mm256_add_ps(_mm512_castps512_ps256(sum[j]), _mm512_extractf32x8_ps(sum[j], 1));
    }
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

#endif

// Query head g (of all queries) of the KV head.
template <typename T>
const T *query_of(const Args &a, int64_t i, int64_t head, int64_t g) {
    const int64_t at = (i * a.queries + g / a.group) * a.kv_heads + head;
    return static_cast<const T *>(a.q) + (at * a.group + g % a.group) * a.head_dim;
}

// Quest's bound of q.k over each page: the sum of max(q high, q low) over dimensions, which is q+ . high + q- . low.
template <typename T>
void quest_bounds(const Args &a, int64_t i, int64_t head, int64_t candidates, int64_t stride, Scratch<T> &scratch) {
    std::vector<T> &split = scratch.split;
    std::vector<float> &bound = scratch.bound;
    const int64_t dim = a.head_dim, heads = a.kv_heads, width = 2 * dim, asking = a.queries * a.group;
    split.resize(asking * width);
    for (int64_t g = 0; g < asking; ++g) {
        const T *query = query_of<T>(a, i, head, g);
        for (int64_t d = 0; d < dim; ++d) {
            const T x = query[d];
            split[g * width + d] = value(x) > 0 ? x : T{};
            split[g * width + dim + d] = value(x) < 0 ? x : T{};
        }
    }
    const T *summaries = static_cast<const T *>(a.summaries);
    const int64_t *pages = a.host_pages + i * a.columns;
    auto summary = [&](int64_t p) { return summaries + (pages[std::min(p, candidates - 1)] * heads + head) * width; };
    for (int64_t p = 0; p < stride; p += BLOCK) {
        const T *rows[BLOCK];
        for (int64_t j = 0; j < BLOCK; ++j) {
            rows[j] = summary(p + j);  // past the last page: that one again
            // pages lie anywhere, so the processor cannot guess the next rows
            const auto *next = reinterpret_cast<const char *>(summary(p + j + PREFETCH));
            for (size_t byte = 0; byte < width * sizeof(T); byte += 64) __builtin_prefetch(next + byte);
        }
        for (int64_t g = 0; g < asking; ++g) dots(split.data() + g * width, rows, width, &bound[g * stride + p]);
    }
    for (float &each : bound) each *= a.scale;
}

constexpr int64_t TOKENS = 16;  // of a sketch's block
constexpr int64_t SKETCH_PREFETCH = 3;  // pages ahead

inline float from_half(uint16_t bits) {
    _Float16 x;
    std::memcpy(&x, &bits, sizeof x);
    return static_cast<float>(x);
}

// The largest q.k of the first `tokens` tokens of a block, for each of `asking` queries, into `out[g * stride]` where it is
// larger. `codes` are queries in 8 bits, `factors` pairs of what products are to be multiplied with and lessened by.
struct Queries {
    int64_t asking;
    const int8_t *codes;
    const float *factors;
};

void block_bounds(const uint8_t *block, int64_t dim, int64_t tokens, const Queries &q, float *out, int64_t stride) {
    const int64_t code_bytes = TOKENS * dim / 2;
    for (int64_t g = 0; g < q.asking; ++g) {
        const int8_t *query = q.codes + g * dim;
        for (int64_t t = 0; t < tokens; ++t) {
            int32_t sum = 0;
            for (int64_t i = 0; i < dim / 8; ++i) {
                for (int64_t j = 0; j < 4; ++j) {
                    const uint8_t packed = block[64 * i + 4 * t + j];
                    sum += (packed & 15) * query[4 * i + j] + (packed >> 4) * query[dim / 2 + 4 * i + j];
                }
            }
            uint16_t bits;
            std::memcpy(&bits, block + code_bytes + 2 * t, sizeof bits);
            const float x = (static_cast<float>(sum) - q.factors[2 * g + 1]) * q.factors[2 * g] * from_half(bits);
            float &best = out[g * stride];
            best = x > best ? x : best;
        }
    }
}

#ifdef __AVX512VNNI__

// The same for a whole block of DIM dimensions, in registers.
template <int DIM>
void block_bounds(const uint8_t *block, const Queries &q, float *out, int64_t stride) {
    constexpr int GROUPS = DIM / 8;
    const __m512i half = _mm512_set1_epi8(15);
    __m512i codes[2 * GROUPS];
    for (int i = 0; i < GROUPS; ++i) {
        const __m512i packed = _mm512_loadu_si512(block + 64 * i);
        codes[i] = _mm512_and_si512(packed, half);
        codes[GROUPS + i] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), half);
    }
    const __m512 unit = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 64 * GROUPS)));
    for (int64_t g = 0; g < q.asking; ++g) {
        __m512i even = _mm512_setzero_si512(), odd = even;
        for (int i = 0; i < 2 * GROUPS; i += 2) {
            int32_t four[2];  // dimensions of the query
            std::memcpy(four, q.codes + g * DIM + 4 * i, sizeof four);
            even = _mm512_dpbusd_epi32(even, codes[i], _mm512_set1_epi32(four[0]));
            odd = _mm512_dpbusd_epi32(odd, codes[i + 1], _mm512_set1_epi32(four[1]));
        }
        __m512 x = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
        x = _mm512_sub_ps(x, _mm512_set1_ps(q.factors[2 * g + 1]));
        x = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(q.factors[2 * g])), unit);
        const float most = _mm512_reduce_max_ps(x);
        float &best = out[g * stride];
        best = most > best ? most : best;
    }
}

#endif

// The largest q.k of each page's tokens, as its sketch tells it.
template <typename T>
void sketch_bounds(const Args &a, int64_t i, int64_t head, int64_t candidates, int64_t stride, Scratch<T> &scratch) {
    std::vector<int8_t> &codes = scratch.codes;
    std::vector<float> &factors = scratch.factors, &bound = scratch.bound;
    const int64_t dim = a.sketch, asking = a.queries * a.group, blocks = (a.page_size + TOKENS - 1) / TOKENS;
    const int64_t code_bytes = TOKENS * dim / 2, block_bytes = code_bytes + 2 * TOKENS, row_bytes = blocks * block_bytes;
    codes.resize(asking * dim);
    factors.resize(2 * asking);
    for (int64_t g = 0; g < asking; ++g) {
        const T *query = query_of<T>(a, i, head, g);
        float most = 0;
        for (int64_t d = 0; d < dim; ++d) most = std::max(most, std::fabs(value(query[a.sketch_dims[d]])));
        const float unit = most / 127.0f;
        int32_t sum = 0;
        for (int64_t d = 0; d < dim; ++d) {
            const float code = unit > 0 ? std::nearbyint(value(query[a.sketch_dims[d]]) / unit) : 0.0f;
            codes[g * dim + d] = static_cast<int8_t>(std::min(std::max(code, -127.0f), 127.0f));
            sum += codes[g * dim + d];
        }
        factors[2 * g] = unit * a.scale;
        factors[2 * g + 1] = 8.0f * static_cast<float>(sum);  // codes of keys are stored 8 higher
    }
    const Queries queries{asking, codes.data(), factors.data()};
    const auto *summaries = static_cast<const uint8_t *>(a.summaries);
    const int64_t *pages = a.host_pages + i * a.columns;
    auto row = [&](int64_t p) { return summaries + (pages[std::min(p, candidates - 1)] * a.kv_heads + head) * row_bytes; };
    for (int64_t p = 0; p < stride; ++p) {
        const auto *next = reinterpret_cast<const char *>(row(p + SKETCH_PREFETCH));
        for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(next + byte);
        for (int64_t g = 0; g < asking; ++g) bound[g * stride + p] = -INF;
        for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t *block = row(p) + b * block_bytes;
            const int64_t tokens = std::min(TOKENS, a.page_size - b * TOKENS);
#ifdef __AVX512VNNI__
            if (tokens == TOKENS && dim == 32) {
                block_bounds<32>(block, queries, &bound[p], stride);
                continue;
            }
            if (tokens == TOKENS && dim == 64) {
                block_bounds<64>(block, queries, &bound[p], stride);
                continue;
            }
#endif
            block_bounds(block, dim, tokens, queries, &bound[p], stride);
        }
    }
}

// How much each page matters: its bounds softmaxed over pages, mean over the query heads of this KV head, and the largest
// of that over the queries.
template <typename T>
void score(const Args &a, int64_t i, int64_t head, int64_t candidates, Scratch<T> &scratch) {
    std::vector<float> &bound = scratch.bound, &scores = scratch.scores;
    const int64_t stride = (candidates + LANES - 1) / LANES * LANES;
    bound.resize(a.queries * a.group * stride);
    if (a.sketch) sketch_bounds<T>(a, i, head, candidates, stride, scratch);
    else quest_bounds<T>(a, i, head, candidates, stride, scratch);
    scores.assign(candidates, 0.0f);
    for (int64_t query = 0; query < a.queries; ++query) {
        float *sum = bound.data() + query * a.group * stride;  // the first head's row becomes the sum of all
        for (int64_t g = 0; g < a.group; ++g) {
            float *b = sum + g * stride;
            // Lane by lane, because compilers do not vectorise the maximum of a whole row where there may be NaNs.
            float tops[LANES];
            std::copy_n(b, LANES, tops);
            for (int64_t p = LANES; p < stride; p += LANES) {
                for (int64_t l = 0; l < LANES; ++l) tops[l] = b[p + l] > tops[l] ? b[p + l] : tops[l];
            }
            const float top = *std::max_element(tops, tops + LANES);
            float total = 0;
            for (int64_t p = 0; p < candidates; ++p) b[p] = exp_of_negative(b[p] - top);
            for (int64_t p = 0; p < candidates; ++p) total += b[p];
            const float share = 1.0f / (total * static_cast<float>(a.group));
            if (g == 0) {
                for (int64_t p = 0; p < candidates; ++p) b[p] *= share;
            } else {
                for (int64_t p = 0; p < candidates; ++p) sum[p] += b[p] * share;
            }
        }
        for (int64_t p = 0; p < candidates; ++p) scores[p] = sum[p] > scores[p] ? sum[p] : scores[p];
    }
}

// The `count` best of `from`, which is in ascending page order and stays so; of equal scores the earlier pages. Scores are
// not negative, so their bits order them as their values do; and bits order NaNs too.
template <typename T>
void best(Scratch<T> &scratch, std::vector<int32_t> &from, int64_t count) {
    const float *scores = scratch.scores.data();
    std::vector<uint32_t> &bits = scratch.bits;
    const int64_t size = static_cast<int64_t>(from.size());
    if (size <= count) return;
    if (count == 0) return from.clear();
    bits.resize(size);
    for (int64_t k = 0; k < size; ++k) std::memcpy(&bits[k], &scores[from[k]], sizeof(float));
    // The least score to keep, bit by bit from the top: the greatest one that `count` scores reach. Counting runs at
    // full width, where a selection by partitions guesses wrong at every second score.
    uint32_t least = 0;
    int32_t above = 0;  // scores greater than `least`
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        const uint32_t next = least | bit;
        int32_t reach = 0;
        for (int64_t k = 0; k < size; ++k) reach += bits[k] >= next;
        if (reach >= count) least = next;
        else above = reach;
    }
    int64_t equal = count - above;  // pages with just the least score that there is room for
    int64_t kept = 0;
    for (int64_t k = 0; k < size; ++k) {
        const bool tie = bits[k] == least;
        from[kept] = from[k];
        kept += bits[k] > least || (tie && equal > 0);
        equal -= tie;
    }
    from.resize(kept);
}

template <typename T>
void task(const Args &a, int64_t i, int64_t head) {
    thread_local Scratch<T> own;
    Scratch<T> &scratch = own;
    std::vector<float> &scores = scratch.scores;
    std::vector<int32_t> &wanted = scratch.wanted, &misses = scratch.misses, &victims = scratch.victims,
                         &resident = scratch.resident;
    const int64_t tail = a.tail[i], row = a.rows[i], heads = a.kv_heads, lane = i * heads + head;
    int32_t *slot_of = a.slot_of + (row * heads + head) * a.sequence_pages;
    int32_t *page_of = a.page_of + (row * heads + head) * a.set_pages;
    int32_t *used = a.last_used + (row * heads + head) * a.set_pages;
    const int32_t step = static_cast<int32_t>(a.step);

    score(a, i, head, tail, scratch);
    for (int64_t p = 0; p < std::min(a.sink, tail); ++p) scores[p] = INF;
    for (int64_t p = std::max<int64_t>(tail - a.recent, 0); p < tail; ++p) scores[p] = INF;
    wanted.resize(tail);
    for (int64_t p = 0; p < tail; ++p) wanted[p] = static_cast<int32_t>(p);
    best(scratch, wanted, a.budget);

    misses.clear();
    for (int32_t p : wanted) {
        if (slot_of[p] == NONE) misses.push_back(p);
        else used[slot_of[p]] = step;
    }
    used[slot_of[tail]] = step;
    a.missed[lane] = static_cast<int64_t>(misses.size());
    // Slots used in this step are wanted or the tail; those a row does not own are marked as used later than any.
    victims.clear();
    if (!misses.empty())
        for (int32_t w = 0; w < a.set_pages; ++w)
            if (used[w] < step) victims.push_back(w);
    best(scratch, misses, std::min<int64_t>(a.cap, static_cast<int64_t>(victims.size())));
    const int64_t count = static_cast<int64_t>(misses.size());
    a.admitted[lane] = count;
    if (count) {
        auto older = [&](int32_t x, int32_t y) { return used[x] != used[y] ? used[x] < used[y] : x < y; };
        std::partial_sort(victims.begin(), victims.begin() + count, victims.end(), older);
        for (int64_t m = 0; m < count; ++m) {
            const int32_t page = misses[m], slot = victims[m], evicted = page_of[slot];
            if (evicted != NONE) slot_of[evicted] = NONE;
            page_of[slot] = page;
            slot_of[page] = slot;
            used[slot] = step;
            const int64_t pool_row = a.cells[a.owned[row * a.set_pages + slot] * heads + head];
            const int64_t fields[MISS_FIELDS] = {a.host_pages[i * a.columns + page], head, pool_row, i, slot, page, evicted};
            for (int64_t f = 0; f < MISS_FIELDS; ++f) a.misses[f * a.miss_stride + lane * a.budget + m] = fields[f];
        }
    }
    int64_t *attended = a.attended + lane * a.budget;
    if (a.missed[lane] > count) {  // the cap left pages out: attend to the best that are resident
        resident.clear();
        for (int64_t p = 0; p < tail; ++p)
            if (slot_of[p] != NONE) resident.push_back(static_cast<int32_t>(p));
        best(scratch, resident, a.budget);
        for (int64_t k = 0; k < a.budget; ++k) used[slot_of[attended[k] = resident[k]]] = step;
    } else {
        for (int64_t k = 0; k < a.budget; ++k) attended[k] = wanted[k];
    }
    // The tier gives the place of the least wanted page to one that was no candidate yet.
    int64_t least = a.budget - 1;
    for (int64_t k = 0; k < a.budget; ++k) least = scores[attended[k]] < scores[attended[least]] ? k : least;
    std::swap(attended[least], attended[a.budget - 1]);
    if (a.table) {
        int64_t *table = a.table + (a.at[i] * heads + head) * a.table_columns;
        const int64_t *owned = a.owned + row * a.set_pages;
        for (int64_t k = 0; k < a.budget; ++k) table[k] = a.cells[owned[slot_of[attended[k]]] * heads + head];
        table[a.budget] = a.cells[owned[slot_of[tail]] * heads + head];
    }
}

template <typename T>
void run(const Args &a) {
    const int64_t tasks = a.sequences * a.kv_heads;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tasks; ++t) task<T>(a, t / a.kv_heads, t % a.kv_heads);
}

// Copies `width` bytes that nobody reads before much else has gone through the caches, and has the same part of what comes
// next fetched meanwhile.
void copy_past_caches(uint8_t *to, const uint8_t *from, const uint8_t *next, int64_t width) {
#ifdef __AVX512F__
    if (width % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t i = 0; i < width; i += 64) {
            _mm_prefetch(reinterpret_cast<const char *>(next + i), _MM_HINT_T0);
            _mm512_stream_si512(reinterpret_cast<__m512i *>(to + i), _mm512_loadu_si512(from + i));
        }
        return;
    }
#endif
    for (int64_t i = 0; i < width; i += 64) __builtin_prefetch(next + i);
    std::memcpy(to, from, width);
}

// Streamed bytes are there for other processes.
void finish_copies() {
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16. Returns how many misses were admitted.
int64_t oasis_refresh(const Args *args, int32_t dtype) {
    const Args &a = *args;
    if (dtype == 0) run<float>(a);
    else run<BFloat16>(a);
    int64_t total = 0;
    for (int64_t lane = 0; lane < a.sequences * a.kv_heads; ++lane) total += a.admitted[lane];
    return total;
}

// The misses that the last refresh admitted, in the order of their lanes, to `out` `[MISS_FIELDS, total]`.
void oasis_take_misses(const Args *args, int64_t total, int64_t *out) {
    const Args &a = *args;
    for (int64_t lane = 0; lane < a.sequences * a.kv_heads; ++lane) {
        const int64_t count = a.admitted[lane], *from = a.misses + lane * a.budget;
        for (int64_t f = 0; f < MISS_FIELDS; ++f) std::copy_n(from + f * a.miss_stride, count, out + f * total);
        out += count;
    }
}

// Fields of a piece on its way to the device, as in pieces.py. Pieces are `[FIELDS, capacity]`.
enum { ROW, GENERATION, HEAD, SLOT, PAGE, EVICTED, LENT, WAITING, SOURCE, TARGET, FIELDS };

// Fields of a miss, as in selector.py.
enum { MISS_HOST, MISS_HEAD, MISS_DEVICE, MISS_SEQUENCE, MISS_SLOT, MISS_PAGE, MISS_EVICTED };

// The misses of one layer `[7, stride]`, of which `count` are there, and the working-set rows of their sequences.
struct LayerMisses {
    int64_t layer, count, stride;
    const int64_t *rows, *misses;
};

// `Bounds` of pieces.py.
struct Bounds {
    int64_t layer, start, end, first_without, end_without;
};

// `Totals` of pieces.py.
struct Totals {
    int64_t used, short_of_rows, runs, waiting, without;
};

constexpr int64_t ADOPT_PREFETCH = 12;  // pieces ahead

// What stays where it is as long as the pools do. Of all layers: `spare` `[layers, heads, spare_pages]`, of which the
// first `left` `[layers, heads]` of each stack are there; `page_of` `[layers, rows, heads, set_pages]`; `cells` `[layers,
// pages, heads]`. The target of a layer begins at id `2 * layer * pool_rows`.
struct Places {
    int64_t layers, heads, rows, set_pages, pages, spare_pages, pool_rows;
    const int64_t *generations, *owned;
    const int32_t *page_of;
    int64_t *cells, *spare, *left;
};

// Lends each miss of some layers a spare row of its layer and head, and fills in its piece: from the first column on
// those that got one, from the last column backwards those that did not; `bounds` `[layers]` says whose are where. Piece
// ids of the source count `[pages, layers, heads]`. `shares` `[any, 3]` gets row, generation and length of each run of
// pieces of an attempt.
void oasis_lend(const Places *places, int64_t layers, const LayerMisses *of_layers, int64_t capacity, int64_t *pieces,
                Bounds *bounds, Totals *totals, int64_t *shares) {
    const Places a = *places;
    int64_t first = 0, last = capacity;
    thread_local std::vector<int64_t> asked;
    for (int64_t n = 0; n < layers; ++n) {
        const LayerMisses &of_layer = of_layers[n];
        asked.assign(a.heads, 0);
        for (int64_t i = 0; i < of_layer.count; ++i) ++asked[of_layer.misses[MISS_HEAD * of_layer.stride + i]];
        int64_t lent = 0;
        for (int64_t h = 0; h < a.heads; ++h) lent += std::min(asked[h], a.left[of_layer.layer * a.heads + h]);
        const int64_t without = of_layer.count - lent;
        bounds[n] = {of_layer.layer, first, first + lent, last - without, last};
        first += lent, last -= without;
    }
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < layers; ++n) {
        const LayerMisses &of_layer = of_layers[n];
        const int64_t layer = of_layer.layer, stride = of_layer.stride;
        const int64_t *spare = a.spare + layer * a.heads * a.spare_pages;
        int64_t *left = a.left + layer * a.heads;
        int64_t sent = bounds[n].start, kept_back = bounds[n].end_without;
        for (int64_t i = 0; i < of_layer.count; ++i) {
            const int64_t *m = of_layer.misses + i;
            const int64_t h = m[MISS_HEAD * stride], row = of_layer.rows[m[MISS_SEQUENCE * stride]];
            const bool lent = left[h] > 0;
            const int64_t at = lent ? spare[h * a.spare_pages + --left[h]] : NONE;
            const int64_t fields[FIELDS] = {row, a.generations[row], h, m[MISS_SLOT * stride], m[MISS_PAGE * stride],
                                            m[MISS_EVICTED * stride], at, lent,
                                            (m[MISS_HOST * stride] * a.layers + layer) * a.heads + h,
                                            2 * layer * a.pool_rows + at};
            int64_t *to = pieces + (lent ? sent++ : --kept_back);
            for (int64_t f = 0; f < FIELDS; ++f) to[f * capacity] = fields[f];
        }
    }
    *totals = {first, capacity - last, 0, 0, 0};
    for (int64_t n = 0; n < layers; ++n) {
        const int64_t bit = int64_t{1} << (bounds[n].layer - bounds[0].layer);
        const bool without = bounds[n].first_without < bounds[n].end_without;
        if (bounds[n].start < bounds[n].end || without) totals->waiting |= bit;
        if (without) totals->without |= bit;
    }
    for (int64_t i = 0; i < first; ++i) {
        const int64_t row = pieces[ROW * capacity + i], generation = pieces[GENERATION * capacity + i];
        int64_t *share = shares + 3 * (totals->runs - 1);
        if (!totals->runs || share[0] != row || share[1] != generation) {
            share += 3, ++totals->runs;
            share[0] = row, share[1] = generation, share[2] = 0;
        }
        ++share[2];
    }
}

// Takes back the spare rows of a plan that has ended. Where the copy is good (`done`) and the maps still count on it, the
// row takes the place of the cell, whose own row goes to the stack. Returns how many did.
int64_t oasis_adopt(const Places *places, int64_t layers, const Bounds *of_layers, int64_t capacity,
                    int64_t *pieces, int64_t done) {
    const Places a = *places;
    int64_t kept = 0;
#pragma omp parallel for schedule(static) reduction(+ : kept)
    for (int64_t n = 0; n < layers; ++n) {
        const int64_t layer = of_layers[n].layer;
        const int32_t *page_of = a.page_of + layer * a.rows * a.heads * a.set_pages;
        int64_t *cells = a.cells + layer * a.pages * a.heads;
        int64_t *spare = a.spare + layer * a.heads * a.spare_pages;
        int64_t *left = a.left + layer * a.heads;
        auto map_of = [&](const int64_t *p) {
            return page_of + (p[ROW * capacity] * a.heads + p[HEAD * capacity]) * a.set_pages + p[SLOT * capacity];
        };
        auto cell_of = [&](const int64_t *p) {
            return cells + a.owned[p[ROW * capacity] * a.set_pages + p[SLOT * capacity]] * a.heads + p[HEAD * capacity];
        };
        for (int64_t i = of_layers[n].start; i < of_layers[n].end; ++i) {
            // Weights went through the caches since these were touched, and they lie anywhere.
            const int64_t *next = pieces + std::min(i + ADOPT_PREFETCH, of_layers[n].end - 1);
            __builtin_prefetch(map_of(next));
            __builtin_prefetch(cell_of(next), 1);
            int64_t *p = pieces + i;
            const int64_t h = p[HEAD * capacity];
            int64_t back = p[LENT * capacity];
            if (done && p[WAITING * capacity] && a.generations[p[ROW * capacity]] == p[GENERATION * capacity] &&
                *map_of(p) == p[PAGE * capacity]) {
                std::swap(back, *cell_of(p));
                ++kept;
            }
            spare[h * a.spare_pages + left[h]++] = back;
            p[LENT * capacity] = NONE;
            if (done) p[WAITING * capacity] = 0;
        }
    }
    return kept;
}

// Copies (page, head) pieces of `width` bytes for K and the same for V. On the host a piece is K and V back to back, in
// `[pages, layers, heads]` order; on the device K and V are apart, each a row of the pool.
void oasis_load(int64_t count, int64_t width, int64_t layers, int64_t layer, int64_t heads, const uint8_t *host,
                const int64_t *host_pages, const int64_t *head, uint8_t *k, uint8_t *v, const int64_t *rows) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t *piece = host + ((host_pages[i] * layers + layer) * heads + head[i]) * 2 * width;
        const int64_t at = rows[i] * width;
        std::memcpy(k + at, piece, width);
        std::memcpy(v + at, piece + width, width);
    }
}

// The same for a prefetch worker, which knows pieces and halves by number only: piece `source_ids[i]` of the source goes to
// the halves `target_ids[i]` (K) and `target_ids[i] + value_stride` (V) of the target. In one thread: workers are
// processes, and as many as the user wants cores to be busy.
void oasis_copy_pieces(int64_t count, int64_t width, int64_t value_stride, const uint8_t *source,
                       const int64_t *source_ids, uint8_t *target, const int64_t *target_ids) {
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t *piece = source + source_ids[i] * 2 * width;
        // Pieces lie anywhere: where the next one is, the processor cannot guess.
        const uint8_t *next = source + source_ids[std::min(i + 1, count - 1)] * 2 * width;
        uint8_t *k = target + target_ids[i] * width;
        copy_past_caches(k, piece, next, width);
        copy_past_caches(k + value_stride * width, piece + width, next + width, width);
    }
    finish_copies();
}

// Gathers the pool rows of a page table `[sequences, heads, columns]` into `k_out` and `v_out`, `width` bytes a row, and
// empties the lanes of each sequence's last page that hold no token.
void oasis_gather(int64_t sequences, int64_t heads, int64_t columns, int64_t width, int64_t page_size,
                  const int64_t *table, const int64_t *tokens, const uint8_t *k, const uint8_t *v, int64_t stride,
                  uint8_t *k_out, uint8_t *v_out) {
    const int64_t lane = width / page_size;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t i = 0; i < sequences; ++i) {
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t base = (i * heads + h) * columns;
            for (int64_t c = 0; c < columns; ++c) {
                std::memcpy(k_out + (base + c) * width, k + table[base + c] * stride, width);
                std::memcpy(v_out + (base + c) * width, v + table[base + c] * stride, width);
            }
            const int64_t used = tokens[i] % page_size;
            if (used) {
                const int64_t from = (base + tokens[i] / page_size) * width + used * lane;
                std::memset(k_out + from, 0, (page_size - used) * lane);
                std::memset(v_out + from, 0, (page_size - used) * lane);
            }
        }
    }
}

// Writes one token's K and V for each sequence into lane `offsets[i]` of pool rows `rows[i, head]`; `lane` bytes each.
// `k` and `v` advance `stride` bytes from one sequence to the next, their heads are adjacent.
void oasis_write_tokens(int64_t sequences, int64_t heads, int64_t lane, int64_t page_size, const int64_t *rows,
                        const int64_t *offsets, const uint8_t *k, const uint8_t *v, int64_t k_stride,
                        int64_t v_stride, uint8_t *k_pool, uint8_t *v_pool) {
    for (int64_t i = 0; i < sequences; ++i) {
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = (rows[i * heads + h] * page_size + offsets[i]) * lane;
            std::memcpy(k_pool + at, k + i * k_stride + h * lane, lane);
            std::memcpy(v_pool + at, v + i * v_stride + h * lane, lane);
        }
    }
}

}
