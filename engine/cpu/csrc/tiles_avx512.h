// Integer tiles for AVX-512 VNNI: R rows x 16 columns, one register of integer sums and one of floats for each row.
// `vpdpbusd` multiplies four unsigned weights of each column with four signed activations. 16-bit activations take two
// passes over the block's weights, which stay in the first-level cache: high bytes, shift, low bytes.
#pragma once
#include "matrix.h"

namespace baton {

// Forbids the compiler to keep a block's decoded weights over the pass: they would not fit in registers beside the sums.
#define PASS_END asm volatile("" ::: "memory")

template <int R>
INLINE void finish(const Vec* f, const Tile& t) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        float* out = t.out + r * t.stride;
        store(out, t.accumulate ? add(f[r], load(out)) : f[r]);
    }
}

template <int R>
INLINE void dot_q4(__m512i* a, const uint8_t* w, const int32_t* x) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        const __m512i both = _mm512_loadu_si512(w + 64 * g);
        const __m512i u0 = _mm512_and_si512(both, low), u1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            a[r] = _mm512_dpbusd_epi32(a[r], u0, _mm512_set1_epi32(x[g * R + r]));
            a[r] = _mm512_dpbusd_epi32(a[r], u1, _mm512_set1_epi32(x[(g + 4) * R + r]));
        }
    }
}

template <int R>
INLINE void dot_w8(__m512i* a, const uint8_t* w, const int32_t* x) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        const __m512i u = _mm512_loadu_si512(w + 64 * g);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) a[r] = _mm512_dpbusd_epi32(a[r], u, _mm512_set1_epi32(x[g * R + r]));
    }
}

template <int R, bool WIDE>
void tile_q4(const Tile& t) {
    constexpr int kWords = WIDE ? 16 : 8;
    Vec f[R];
    for (int r = 0; r < R; r++) f[r] = zero();
    for (i64 b = 0; b < t.blocks; b++) {
        const uint8_t* w = t.weights + b * 320;
        const int32_t* x = t.values + b * kWords * R;
        fetch<320>(w, t.ahead);
        __m512i a[R];
        for (int r = 0; r < R; r++) a[r] = _mm512_setzero_si512();
        dot_q4<R>(a, w + 64, x);
        if (WIDE) {
            PASS_END;
            for (int r = 0; r < R; r++) a[r] = _mm512_slli_epi32(a[r], 8);
            dot_q4<R>(a, w + 64, x + 8 * R);
        }
        const Vec d = load((const Half*)w), m = load((const Half*)(w + 32));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            f[r] = fma(m, splat(t.sums[b * R + r]), f[r]);
            f[r] = fma(_mm512_cvtepi32_ps(a[r]), mul(d, splat(t.scales[b * R + r])), f[r]);
        }
    }
    finish<R>(f, t);
}

template <int R>
void tile_w8(const Tile& t) {
    Vec f[R];
    for (int r = 0; r < R; r++) f[r] = zero();
    for (i64 b = 0; b < t.blocks; b++) {
        const uint8_t* w = t.weights + b * 544;
        const int32_t* x = t.values + b * 16 * R;
        fetch<544>(w, t.ahead);
        __m512i a[R];
        for (int r = 0; r < R; r++) a[r] = _mm512_setzero_si512();
        dot_w8<R>(a, w + 32, x);
        PASS_END;
        for (int r = 0; r < R; r++)
            a[r] = _mm512_add_epi32(_mm512_slli_epi32(a[r], 8), _mm512_set1_epi32(t.offsets[b * R + r]));
        dot_w8<R>(a, w + 32, x + 8 * R);
        const Vec d = load((const Half*)w);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            f[r] = fma(_mm512_cvtepi32_ps(a[r]), mul(d, splat(t.scales[b * R + r])), f[r]);
    }
    finish<R>(f, t);
}

template <int R>
void tile_fp32(const Tile& t) {
    const float* w = (const float*)t.weights;
    const float* x = (const float*)t.values;
    Vec f[R];
    for (int r = 0; r < R; r++) f[r] = zero();
    for (i64 k = 0; k < t.blocks * kBlock; k++) {
        const Vec column = load(w + k * kPanel);
        if (R <= 2) _mm_prefetch((const char*)(w + (k + 32) * kPanel), _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) f[r] = fma(splat(x[k * R + r]), column, f[r]);
    }
    finish<R>(f, t);
}

}  // namespace baton
