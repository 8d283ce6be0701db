// One vector type for both instruction sets: VL floats. Attention and the elementwise kernels are written once on it.
// The file is compiled once for each level into a library of its own, so no AVX-512 instruction can leak into the
// other build through an inline function that the linker merges.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace baton {

using i64 = int64_t;

#define INLINE static inline __attribute__((always_inline))

struct Half {  // IEEE binary16, as stored
    uint16_t bits;
};

struct Brain {  // bfloat16: the upper half of a float
    uint16_t bits;
};

struct Byte {  // a signed byte that counts in units of a scale kept elsewhere
    int8_t value;
};

#if defined(__AVX512VNNI__)
#define BATON_AVX512 1
constexpr int VL = 16;
using Vec = __m512;
INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Vec load(const Brain* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE Vec load(const Byte* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
INLINE float sum(Vec v) { return _mm512_reduce_add_ps(v); }
INLINE float max_of(Vec v) { return _mm512_reduce_max_ps(v); }
INLINE Vec round(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec pow2(Vec n) {  // 2^n of integral n
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// most = v and tag_of_most = tag where v is greater, or is the first NaN.
INLINE void keep_greater(Vec v, Vec tag, float* most, float* tag_of_most) {
    const Vec old = load(most);
    const __mmask16 better = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(old, old, _CMP_ORD_Q), v, old, _CMP_NLE_UQ);
    _mm512_mask_storeu_ps(most, better, v);
    _mm512_mask_storeu_ps(tag_of_most, better, tag);
}
// The sums of four vectors, in order.
INLINE __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
    const auto fold = [](Vec v) __attribute__((always_inline)) {
        return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    };
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
#else
constexpr int VL = 8;
using Vec = __m256;
INLINE Vec zero() { return _mm256_setzero_ps(); }
INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE Vec load(const Brain* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE Vec load(const Byte* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
INLINE float sum(Vec v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
INLINE float max_of(Vec v) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
INLINE Vec round(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec pow2(Vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE void keep_greater(Vec v, Vec tag, float* most, float* tag_of_most) {  // as above
    const Vec old = load(most);
    const Vec better = _mm256_and_ps(_mm256_cmp_ps(old, old, _CMP_ORD_Q), _mm256_cmp_ps(v, old, _CMP_NLE_UQ));
    store(most, _mm256_blendv_ps(old, v, better));
    store(tag_of_most, _mm256_blendv_ps(load(tag_of_most), tag, better));
}
INLINE __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
#endif

// Eight lanes, where a row need not be a multiple of VL.
INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
INLINE __m256 load8(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m256 load8(const Brain* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE __m256 load8(const Byte* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE void store8(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
INLINE void store8(Half* p, __m256 v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void store8(Brain* p, __m256 v) {  // to nearest, ties to even
    const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
INLINE void store8(Byte* p, __m256 v) {
    const __m256i whole = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
INLINE float to_float(Half h) { return _cvtsh_ss(h.bits); }
INLINE Half to_half(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

// e^x, relative error 2e-7: range reduction by ln 2 in two parts, then the polynomial of Cephes' expf.
INLINE Vec exp(Vec x) {
    x = min(max(x, splat(-87.f)), splat(88.f));
    const Vec n = round(mul(x, splat(1.44269504f)));
    Vec r = fma(n, splat(-0.693145752f), x);
    r = fma(n, splat(-1.42860677e-6f), r);
    Vec p = splat(1.98756915e-4f);
    p = fma(p, r, splat(1.39819995e-3f));
    p = fma(p, r, splat(8.33345205e-3f));
    p = fma(p, r, splat(4.16657962e-2f));
    p = fma(p, r, splat(1.66666657e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, mul(r, r), add(r, splat(1.f)));
    return mul(p, pow2(n));
}

INLINE Vec tanh(Vec x) {  // 1 - 2 / (e^2x + 1)
    return sub(splat(1.f), div(splat(2.f), add(exp(add(x, x)), splat(1.f))));
}

INLINE Vec silu(Vec x) { return div(x, add(splat(1.f), exp(sub(zero(), x)))); }

INLINE Vec gelu_tanh(Vec x) {  // Hendrycks & Gimpel's approximation, "gelu_pytorch_tanh"
    const Vec inner = mul(splat(0.7978845608f), mul(x, fma(mul(x, x), splat(0.044715f), splat(1.f))));
    return mul(mul(splat(0.5f), x), add(splat(1.f), tanh(inner)));
}

INLINE void transpose8(const __m256 in[8], float* out, i64 stride) {  // out[c * stride + r] = in[r][c]
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        store8(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        store8(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

}  // namespace baton
