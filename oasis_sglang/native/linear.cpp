// y = x W^T for the few rows of a decode step, bfloat16 in and out, float32 sums.
//
// A product with up to 16 rows does nothing but read W. General libraries re-arrange it into tiles first, which costs as
// much again; here each thread streams its share of W once, in the order it lies in memory. Each output is summed in an
// order that does not depend on the number of rows, so a sequence gets the same bits in any batch.

#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef __AVX512BF16__

constexpr int AHEAD = 4;  // rows of W

// R rows of W against M rows of x; M * R accumulators must fit the 32 vector registers.
template <int M, int R>
void block(const uint16_t *x, const uint16_t *w, int64_t k, float *out) {
    __m512 sum[R][M];
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) sum[r][m] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 32) {
        __m512bh weight[R];
        for (int r = 0; r < R; ++r) {
            weight[r] = (__m512bh)_mm512_loadu_si512(w + r * k + i);
            // The rows some blocks on: without it the sums wait for memory half of the time. Past the end of W it does
            // nothing.
            _mm_prefetch(reinterpret_cast<const char *>(w + (r + AHEAD) * k + i), _MM_HINT_T0);
        }
        for (int m = 0; m < M; ++m) {
            const __m512bh value = (__m512bh)_mm512_loadu_si512(x + m * k + i);
            for (int r = 0; r < R; ++r) sum[r][m] = _mm512_dpbf16_ps(sum[r][m], weight[r], value);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) out[r * M + m] = _mm512_reduce_add_ps(sum[r][m]);
}

#else

float from_bfloat16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <int M, int R>
void block(const uint16_t *x, const uint16_t *w, int64_t k, float *out) {
    for (int r = 0; r < R; ++r) {
        for (int m = 0; m < M; ++m) {
            float sum = 0;
            for (int64_t i = 0; i < k; ++i) sum += from_bfloat16(x[m * k + i]) * from_bfloat16(w[r * k + i]);
            out[r * M + m] = sum;
        }
    }
}

#endif

template <int M>
void product(int64_t n, int64_t k, const uint16_t *x, const uint16_t *w, uint16_t *y) {
    constexpr int R = M <= 2 ? 4 : M <= 8 ? 2 : 1;
    const int64_t blocks = n / R;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) {
        float out[R * M];
        block<M, R>(x, w + b * R * k, k, out);
        for (int r = 0; r < R; ++r)
            for (int m = 0; m < M; ++m) y[m * n + b * R + r] = to_bfloat16(out[r * M + m]);
    }
    for (int64_t row = blocks * R; row < n; ++row) {
        float out[M];
        block<M, 1>(x, w + row * k, k, out);
        for (int m = 0; m < M; ++m) y[m * n + row] = to_bfloat16(out[m]);
    }
}

template <int M>
bool dispatch(int64_t rows, int64_t n, int64_t k, const uint16_t *x, const uint16_t *w, uint16_t *y) {
    if (rows == M) return product<M>(n, k, x, w, y), true;
    if constexpr (M > 1) return dispatch<M - 1>(rows, n, k, x, w, y);
    return false;
}

}  // namespace

extern "C" {

// Whether the kernel is worth using on this machine: with the processor's own bfloat16 products.
int32_t oasis_linear_is_fast() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// x `[rows, k]`, w `[n, k]`, y `[rows, n]`, all contiguous; rows 1 to 16, k a multiple of 32.
void oasis_linear(int64_t rows, int64_t n, int64_t k, const uint16_t *x, const uint16_t *w, uint16_t *y) {
    dispatch<16>(rows, n, k, x, w, y);
}

}
