// Integer tiles for AVX2: R rows x 16 columns as two halves of 8. 8-bit activations against 4-bit weights: `vpmaddubsw`,
// eight of them summed in 16 bits (8 * 2 * 15 * 127 = 30480 fits), then one `vpmaddwd`. Everything else widens the
// weights to 16 bits, even and odd bytes apart, and sums `vpmaddwd` in 32 bits (32 * 255 * 32512 fits).
//
// Six rows fill the registers: 12 sums, two of weights, an activation, a product. Loads and broadcasts then cost nothing
// on Zen 3: what bounds these loops is that additions take turns at the multiplier's ports, so that 1.6 products start
// in a cycle, not two, in whatever order they are written.
#pragma once
#include "matrix.h"

namespace baton {

// Pins a value to a register: GCC reorders the broadcasts and spills the sums otherwise.
#define KEEP(v) asm volatile("" : "+x"(v))
// Keeps an array where it is: GCC takes its elements for variables otherwise, and copies them all for each block.
#define IN_MEMORY(array) asm volatile("" : : "r"(array) : "memory")

template <int R>
INLINE void finish(const float* f, const Tile& t) {
    for (int r = 0; r < R; r++)
        for (int j = 0; j < kPanel; j += 8) {
            float* out = t.out + r * t.stride + j;
            const Vec v = load(f + r * kPanel + j);
            store(out, t.accumulate ? add(v, load(out)) : v);
        }
}

template <int R>
INLINE void scale_block(float* f, const __m256i (*a)[2], const Tile& t, i64 b, const Half* d, const Half* m) {
    const Vec dv[2] = {load(d), load(d + 8)}, mv[2] = {m ? load(m) : zero(), m ? load(m + 8) : zero()};
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        const Vec scale = splat(t.scales[b * R + r]), total = splat(t.sums[b * R + r]);
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            float* out = f + r * kPanel + n * 8;
            const Vec v = m ? fma(mv[n], total, _mm256_load_ps(out)) : _mm256_load_ps(out);
            _mm256_store_ps(out, fma(_mm256_cvtepi32_ps(a[r][n]), mul(dv[n], scale), v));
        }
    }
}

template <int R>
INLINE void tile_q4_narrow(const Tile& t) {
    alignas(32) float f[R * kPanel] = {};
    IN_MEMORY(f);
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    for (i64 b = 0; b < t.blocks; b++) {
        const uint8_t* w = t.weights + b * 320;
        const int32_t* x = t.values + b * 8 * R;
        fetch<320>(w, t.ahead);
        __m256i a[R][2];
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            __m256i u0 = _mm256_loadu_si256((const __m256i*)(w + 64 + (g & 3) * 64));
            __m256i u1 = _mm256_loadu_si256((const __m256i*)(w + 96 + (g & 3) * 64));
            if (g > 3) u0 = _mm256_srli_epi16(u0, 4), u1 = _mm256_srli_epi16(u1, 4);
            u0 = _mm256_and_si256(u0, low), u1 = _mm256_and_si256(u1, low);
            KEEP(u0);
            KEEP(u1);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256i xv = _mm256_set1_epi32(x[g * R + r]);
                const __m256i p0 = _mm256_maddubs_epi16(u0, xv), p1 = _mm256_maddubs_epi16(u1, xv);
                a[r][0] = g ? _mm256_add_epi16(a[r][0], p0) : p0;
                a[r][1] = g ? _mm256_add_epi16(a[r][1], p1) : p1;
                KEEP(a[r][0]);
                KEEP(a[r][1]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            a[r][0] = _mm256_madd_epi16(a[r][0], one);
            a[r][1] = _mm256_madd_epi16(a[r][1], one);
        }
        scale_block<R>(f, a, t, b, (const Half*)w, (const Half*)(w + 32));
        asm volatile("" ::: "memory");
    }
    finish<R>(f, t);
}

// 16-bit activations. Q4: nibbles; else bytes with an offset of 128.
template <int R, bool Q4>
INLINE void tile_wide(const Tile& t) {
    constexpr int kBytes = Q4 ? 320 : 544;
    alignas(32) float f[R * kPanel] = {};
    IN_MEMORY(f);
    const __m256i low = _mm256_set1_epi16(Q4 ? 0xF : 0xFF);
    for (i64 b = 0; b < t.blocks; b++) {
        const uint8_t* w = t.weights + b * kBytes;
        const int32_t* x = t.values + b * 16 * R;
        fetch<kBytes>(w, t.ahead);
        __m256i a[R][2];
        for (int r = 0; r < R; r++) a[r][0] = a[r][1] = Q4 ? _mm256_setzero_si256() : _mm256_set1_epi32(t.offsets[b * R + r]);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const uint8_t* at = w + (Q4 ? 64 + (g & 3) * 64 : 32 + g * 64);
                __m256i u0 = _mm256_loadu_si256((const __m256i*)at), u1 = _mm256_loadu_si256((const __m256i*)(at + 32));
                const int shift = 8 * odd + (Q4 && g > 3 ? 4 : 0);
                if (shift) u0 = _mm256_srli_epi16(u0, shift), u1 = _mm256_srli_epi16(u1, shift);
                if (shift + (Q4 ? 4 : 8) < 16) u0 = _mm256_and_si256(u0, low), u1 = _mm256_and_si256(u1, low);
                KEEP(u0);
                KEEP(u1);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const __m256i xv = _mm256_set1_epi32(x[(2 * g + odd) * R + r]);
                    a[r][0] = _mm256_add_epi32(a[r][0], _mm256_madd_epi16(u0, xv));
                    a[r][1] = _mm256_add_epi32(a[r][1], _mm256_madd_epi16(u1, xv));
                    KEEP(a[r][0]);
                    KEEP(a[r][1]);
                }
            }
        scale_block<R>(f, a, t, b, (const Half*)w, Q4 ? (const Half*)(w + 32) : nullptr);
        asm volatile("" ::: "memory");
    }
    finish<R>(f, t);
}

template <int R, bool WIDE>
void tile_q4(const Tile& t) {
    if constexpr (WIDE)
        tile_wide<R, true>(t);
    else
        tile_q4_narrow<R>(t);
}

template <int R>
void tile_w8(const Tile& t) {
    tile_wide<R, false>(t);
}

template <int R>
void tile_fp32(const Tile& t) {
    const float* w = (const float*)t.weights;
    const float* x = (const float*)t.values;
    Vec a[R][2];
    for (int r = 0; r < R; r++) a[r][0] = a[r][1] = zero();
    for (i64 k = 0; k < t.blocks * kBlock; k++) {
        const Vec w0 = load(w + k * kPanel), w1 = load(w + k * kPanel + 8);
        if (R <= 2) _mm_prefetch((const char*)(w + (k + 32) * kPanel), _MM_HINT_T0);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const Vec xv = splat(x[k * R + r]);
            a[r][0] = fma(xv, w0, a[r][0]);
            a[r][1] = fma(xv, w1, a[r][1]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < 2; n++) {
            float* out = t.out + r * t.stride + n * 8;
            store(out, t.accumulate ? add(a[r][n], load(out)) : a[r][n]);
        }
}

}  // namespace baton
