// Slabs of a KV block to one byte a value and back; see quantising.py, which defines the format in numpy.
//
// A slab's values are read once into floats that stay in the first-level cache: largest value of each channel, scale of
// each group of channels, then bytes. All inner loops run along heads * dim, which is contiguous.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using i64 = int64_t;

struct Shape {
    i64 count, tokens, heads, dim, group;
    int32_t dtype;  // 0 float32, 1 float16, 2 bfloat16
    int32_t kind;   // 0 int8, 1 fp8 (e4m3)

    i64 width() const { return heads * dim; }
    i64 groups() const { return width() / group; }
    i64 values() const { return tokens * width(); }
    i64 value_bytes() const { return dtype == 0 ? 4 : 2; }
};

constexpr float kTiny = 1e-30f;
constexpr float kHalfMax = 65504.f;
constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even, in the low bits
constexpr int kBiasDifference = 127 - 7;

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void load(const char* source, int dtype, i64 count, float* out) {
    if (dtype == 0) {
        std::memcpy(out, source, 4 * count);
        return;
    }
    const auto* values = reinterpret_cast<const uint16_t*>(source);
    if (dtype == 2) {
        for (i64 i = 0; i < count; i++) out[i] = float_of(uint32_t(values[i]) << 16);
        return;
    }
    i64 i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i))));
    for (; i < count; i++) out[i] = _cvtsh_ss(values[i]);
}

void store(const float* values, int dtype, i64 count, char* target) {
    if (dtype == 0) {
        std::memcpy(target, values, 4 * count);
        return;
    }
    auto* out = reinterpret_cast<uint16_t*>(target);
    if (dtype == 2) {
        for (i64 i = 0; i < count; i++) {
            const uint32_t bits = bits_of(values[i]);
            out[i] = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        }
        return;
    }
    const __m256 top = _mm256_set1_ps(kHalfMax), bottom = _mm256_set1_ps(-kHalfMax);
    i64 i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 value = _mm256_max_ps(bottom, _mm256_min_ps(top, _mm256_loadu_ps(values + i)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < count; i++)
        out[i] = _cvtss_sh(std::fmax(-kHalfMax, std::fmin(kHalfMax, values[i])), _MM_FROUND_TO_NEAREST_INT);
}

void to_int8(const float* values, const float* inverse, i64 width, uint8_t* out) {
    for (i64 c = 0; c < width; c++) out[c] = uint8_t(bits_of(values[c] * inverse[c] + kRound));
}

void to_fp8(const float* values, const float* inverse, i64 width, uint8_t* out) {
    for (i64 c = 0; c < width; c++) {
        const uint32_t bits = bits_of(values[c] * inverse[c]), magnitude = bits & 0x7FFFFFFF;
        const float size = float_of(magnitude);
        const uint32_t normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (kBiasDifference << 3);
        const uint32_t below = bits_of(size * 512.f + kRound) & 0xFF;
        out[c] = uint8_t((size < 0.015625f ? below : normal) | ((bits >> 31) << 7));
    }
}

void from_int8(const uint8_t* codes, const float* scales, i64 width, float* out) {
    for (i64 c = 0; c < width; c++) out[c] = float(int8_t(codes[c])) * scales[c];
}

void from_fp8(const uint8_t* codes, const float* scales, i64 width, float* out) {
    const float lift = float_of(uint32_t(127 + kBiasDifference) << 23);
    for (i64 c = 0; c < width; c++) {
        const float magnitude = float_of(uint32_t(codes[c] & 0x7F) << 20) * lift;
        out[c] = (codes[c] & 0x80 ? -magnitude : magnitude) * scales[c];
    }
}

// Largest magnitude of each channel over all tokens; returns whether all values are finite.
bool largest_of(const Shape& s, const float* values, float* largest, float* poison) {
    const i64 width = s.width();
    std::memset(largest, 0, 4 * width);
    std::memset(poison, 0, 4 * width);
    for (i64 t = 0; t < s.tokens; t++) {
        const float* row = values + t * width;
        for (i64 c = 0; c < width; c++) {
            const float size = std::fabs(row[c]);
            largest[c] = size > largest[c] ? size : largest[c];
            poison[c] += row[c] * 0.f;  // NaN from infinities and NaN, else 0
        }
    }
    bool is_finite = true;
    for (i64 c = 0; c < width; c++) is_finite &= poison[c] == 0.f;
    return is_finite;
}

}  // namespace

extern "C" {

// Returns 1 if a value is not finite, else 0.
int32_t baton_quantise(const Shape* shape, const char* source, char* target) {
    const Shape& s = *shape;
    const i64 width = s.width();
    const float largest_code = s.kind == 0 ? 127.f : 448.f;
    std::vector<float> values(s.values()), largest(width), poison(width), inverse(width);
    auto* scales = reinterpret_cast<float*>(target);
    auto* codes = reinterpret_cast<uint8_t*>(target) + 4 * s.count * s.groups();
    for (i64 n = 0; n < s.count; n++) {
        load(source + n * s.values() * s.value_bytes(), s.dtype, s.values(), values.data());
        if (!largest_of(s, values.data(), largest.data(), poison.data())) return 1;
        for (i64 g = 0; g < s.groups(); g++) {
            float top = 0.f;
            for (i64 c = g * s.group; c < (g + 1) * s.group; c++) top = largest[c] > top ? largest[c] : top;
            const bool is_used = top > kTiny;
            *scales++ = is_used ? top * float(1.0 / largest_code) : 0.f;
            for (i64 c = g * s.group; c < (g + 1) * s.group; c++) inverse[c] = is_used ? largest_code / top : 0.f;
        }
        for (i64 t = 0; t < s.tokens; t++, codes += width)
            s.kind == 0 ? to_int8(values.data() + t * width, inverse.data(), width, codes)
                        : to_fp8(values.data() + t * width, inverse.data(), width, codes);
    }
    return 0;
}

int32_t baton_restore(const Shape* shape, const char* source, char* target) {
    const Shape& s = *shape;
    const i64 width = s.width();
    std::vector<float> values(s.values()), scale(width);
    const auto* scales = reinterpret_cast<const float*>(source);
    const auto* codes = reinterpret_cast<const uint8_t*>(source) + 4 * s.count * s.groups();
    for (i64 n = 0; n < s.count; n++) {
        for (i64 g = 0; g < s.groups(); g++, scales++)
            for (i64 c = g * s.group; c < (g + 1) * s.group; c++) scale[c] = *scales;
        for (i64 t = 0; t < s.tokens; t++, codes += width)
            s.kind == 0 ? from_int8(codes, scale.data(), width, values.data() + t * width)
                        : from_fp8(codes, scale.data(), width, values.data() + t * width);
        store(values.data(), s.dtype, s.values(), target + n * s.values() * s.value_bytes());
    }
    return 0;
}
}
