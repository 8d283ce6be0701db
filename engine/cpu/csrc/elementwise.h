// What happens to one row between two matrix products. Rows are padded to 32 floats with zeros.
#pragma once
#include "attention.h"
#include "simd.h"

namespace baton {

INLINE i64 padded(i64 n) { return (n + 31) / 32 * 32; }

// out = x / rms(x) * weight over `width` values, zero beyond.
inline void rms_norm(const float* x, const float* weight, i64 width, float epsilon, float* out) {
    Vec squares = zero();
    for (i64 i = 0; i < padded(width); i += VL) squares = fma(load(x + i), load(x + i), squares);
    const Vec scale = splat(1.f / std::sqrt(sum(squares) / float(width) + epsilon));
    for (i64 i = 0; i < padded(width); i += VL) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

inline void add_row(float* x, const float* y, i64 width) {
    for (i64 i = 0; i < padded(width); i += VL) store(x + i, add(load(x + i), load(y + i)));
}

// out = activation(gate) * up; a row is [gate, up], each `width` (padded) wide.
inline void gated(const float* row, i64 width, bool gelu, float* out) {
    for (i64 i = 0; i < width; i += VL) {
        const Vec gate = load(row + i);
        store(out + i, mul(gelu ? gelu_tanh(gate) : silu(gate), load(row + width + i)));
    }
}

// In place, over `dim` values, a multiple of 16.
inline void head_norm(float* x, const float* weight, i64 dim, float epsilon) {
    Vec squares = zero();
    for (i64 i = 0; i < dim; i += VL) squares = fma(load(x + i), load(x + i), squares);
    const Vec scale = splat(1.f / std::sqrt(sum(squares) / float(dim) + epsilon));
    for (i64 i = 0; i < dim; i += VL) store(x + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Rotates the two halves of a head: cos and sin of `dim / 2` angles.
inline void rotate(float* x, const float* cosine, const float* sine, i64 dim) {
    const i64 half = dim / 2;
    for (i64 i = 0; i < half; i += 8) {
        const __m256 a = load8(x + i), b = load8(x + half + i), c = load8(cosine + i), s = load8(sine + i);
        store8(x + i, _mm256_fnmadd_ps(b, s, _mm256_mul_ps(a, c)));
        store8(x + half + i, _mm256_fmadd_ps(a, s, _mm256_mul_ps(b, c)));
    }
}

// One head's row to the pool; for bytes, `scale` gets the unit: a 127th of the greatest magnitude, as fp16 rounds it.
template <class T>
INLINE void write_head(const float* row, i64 dim, T* out, Half* scale) {
    if constexpr (std::is_same_v<T, Byte>) {
        Vec peak = zero();
        for (i64 d = 0; d < dim; d += VL) peak = max(peak, abs(load(row + d)));
        *scale = to_half(max_of(peak) / 127.f);
        const float unit = to_float(*scale);
        const __m256 inverse = _mm256_set1_ps(unit > 0 ? 1.f / unit : 0.f);
        for (i64 d = 0; d < dim; d += 8) store8(out + d, _mm256_mul_ps(load8(row + d), inverse));
    } else {
        for (i64 d = 0; d < dim; d += 8) store8(out + d, load8(row + d));
    }
}

template <class T>
void write_kv(const LayerView<T>& view, i64 slot, const float* key, const float* value, i64 dim) {
    const int32_t block = int32_t(slot / view.block_tokens);
    const i64 position = slot % view.block_tokens, at = view.offset(&block, position, 0);
    for (i64 h = 0; h < view.kv_heads; h++) {
        Half *key_scale = nullptr, *value_scale = nullptr;
        if constexpr (view.kScaled) {
            key_scale = view.scales(view.keys, &block, position) + h;
            value_scale = view.scales(view.values, &block, position) + h;
        }
        write_head(key + h * dim, dim, view.keys + at + h * view.head_stride, key_scale);
        write_head(value + h * dim, dim, view.values + at + h * view.head_stride, value_scale);
    }
}

}  // namespace baton
