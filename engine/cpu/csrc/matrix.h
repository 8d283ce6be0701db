// Packed weights and quantised activations.
//
// A matrix [N, K] is cut into panels of 16 output columns; a panel holds its K in blocks of 32, one after the other, so
// that a product walks through memory in one stream. Both instruction sets read the same bytes. In a block:
//
//   fp32  32 x 16 floats                      w[k][column]
//   w8    16 half d | 8 x 64 bytes            w = d (u - 128); u of column c, k = 4 g + e at g * 64 + 4 c + e
//   q4    16 half d | 16 half m | 4 x 64 B    w = d u + m; low nibbles k = 4 g + e, high nibbles k = 16 + 4 g + e
//
// q4 is GGUF's Q4_1 (or Q4_0, with m = -8 d) and w8 is its Q8_0, reordered byte by byte: nothing is rounded again.
//
// Activations are quantised for each row and block of 32 to 8 bits, or to 16 bits, which AVX-512 keeps as 256 h + l with
// two signed bytes. All sums inside a block are exact integers, and blocks are added in order of k: an output does not
// depend on which rows share its tile, nor (but for attention and norms) on the instruction set.
#pragma once
#include <vector>

#include "simd.h"

namespace baton {

constexpr int kPanel = 16;  // columns
constexpr int kBlock = 32;  // k

enum Format : int32_t { kFp32 = 0, kW8 = 1, kQ4 = 2 };
enum Precision : int32_t { kExact = 0, kInt8 = 1, kInt16 = 2 };

struct Matrix {  // mirrored by native.py
    const uint8_t* data;
    i64 n;  // columns of the output, padded to 16
    i64 k;  // padded to 32
    int32_t format;
    int32_t precision;

    i64 block_bytes() const { return format == kFp32 ? 2048 : format == kW8 ? 544 : 320; }
    i64 panel_bytes() const { return k / kBlock * block_bytes(); }
};

#ifdef BATON_AVX512
constexpr int kTileRows = 12;  // 12 integer and 12 float accumulators of 32 registers
#else
constexpr int kTileRows = 6;  // 12 accumulators of 16 registers
#endif

// What one tile's kernel gets: some rows of activations, one panel of weights.
struct Tile {
    const int32_t* values;
    const float* scales;
    const float* sums;
    const int32_t* offsets;
    const uint8_t* weights;
    i64 blocks;
    float* out;
    i64 stride;
    bool accumulate;
    i64 ahead;  // bytes from a block to what is fetched while it is computed; 0: nothing
};

template <int BYTES>
INLINE void fetch(const uint8_t* block, i64 ahead) {
    if (ahead)
        for (int i = 0; i < BYTES; i += 64) _mm_prefetch((const char*)(block + ahead + i), _MM_HINT_T0);
}

// The rows of one GEMM's input, in tiles of at most kTileRows rows whose values lie interleaved: the kernel broadcasts
// one value (or a group of four bytes) of each row of a tile from consecutive addresses.
class Activations {
   public:
    void shape(i64 rows, i64 k, Precision precision) {
        rows_ = rows;
        k_ = k;
        precision_ = precision;
        num_tiles_ = (rows + kTileRows - 1) / kTileRows;
        const i64 blocks = k / kBlock;
        if (i64(values_.size()) < rows * blocks * words()) values_.resize(rows * blocks * words());
        if (i64(scales_.size()) < rows * blocks) {
            scales_.resize(rows * blocks);
            sums_.resize(rows * blocks);
            offsets_.resize(rows * blocks);
        }
    }

    // Rows are dealt to tiles evenly: 13 rows are 7 and 6, not 12 and 1.
    i64 num_tiles() const { return num_tiles_; }
    i64 tile_begin(i64 tile) const { return tile * rows_ / num_tiles_; }
    i64 rows() const { return rows_; }
    Precision precision() const { return precision_; }

    const int32_t* values(i64 row) const { return values_.data() + row * (k_ / kBlock) * words(); }
    const float* scales(i64 row) const { return scales_.data() + row * (k_ / kBlock); }
    const float* sums(i64 row) const { return sums_.data() + row * (k_ / kBlock); }
    const int32_t* offsets(i64 row) const { return offsets_.data() + row * (k_ / kBlock); }

    // Quantises one row: `values` has k floats, zero beyond the true width.
    void set_row(i64 row, const float* values) {
        // The tile that holds `row`: the inverse of tile_begin.
        i64 tile = ((row + 1) * num_tiles_ - 1) / rows_;
        const i64 begin = tile_begin(tile), height = tile_begin(tile + 1) - begin, lane = row - begin;
        const i64 blocks = k_ / kBlock;
        int32_t* q = values_.data() + begin * blocks * words() + lane;
        if (precision_ == kExact) {
            for (i64 k = 0; k < k_; k++) std::memcpy(q + k * height, values + k, 4);
            return;
        }
        float* scale = scales_.data() + begin * blocks + lane;
        float* sum_of = sums_.data() + begin * blocks + lane;
        int32_t* offset = offsets_.data() + begin * blocks + lane;
        const float limit = precision_ == kInt8 ? 127.f : 32512.f;  // 32512 = 127 * 256: h stays a signed byte
        for (i64 b = 0; b < blocks; b++) {
            const float* v = values + b * kBlock;
            Vec peak = zero();
            for (int i = 0; i < kBlock; i += VL) peak = max(peak, abs(load(v + i)));
            const float most = max_of(peak);
            const float inverse = most > 0 ? limit / most : 0.f;
            alignas(64) int32_t words_of[kBlock];
            const int32_t total = quantise_block(v, std::isfinite(inverse) ? inverse : 0.f, words_of);
            const float s = most / limit;
            for (i64 i = 0; i < words(); i++) q[(b * words() + i) * height] = words_of[i];
            scale[b * height] = s;
            sum_of[b * height] = s * float(total);
            offset[b * height] = -128 * total;
        }
    }

   private:
    i64 words() const {  // 32-bit words of a row's block
        return precision_ == kExact ? 32 : precision_ == kInt8 ? 8 : 16;
    }

    // Writes words() words, returns the sum of the 32 integers.
    int32_t quantise_block(const float* v, float inverse, int32_t* out) const;

    i64 rows_ = 0, k_ = 0, num_tiles_ = 0;
    Precision precision_ = kExact;
    std::vector<int32_t> values_;
    std::vector<float> scales_, sums_;  // s and s * (sum of the integers), of each block and row
    std::vector<int32_t> offsets_;      // -128 * (sum of the integers): what u - 128 takes away
};

#ifdef BATON_AVX512
inline int32_t Activations::quantise_block(const float* v, float inverse, int32_t* out) const {
    const Vec scale = splat(inverse);
    const __m512i a = _mm512_cvtps_epi32(mul(load(v), scale)), b = _mm512_cvtps_epi32(mul(load(v + 16), scale));
    __m128i* bytes = (__m128i*)out;
    if (precision_ == kInt8) {
        _mm_store_si128(bytes, _mm512_cvtepi32_epi8(a));
        _mm_store_si128(bytes + 1, _mm512_cvtepi32_epi8(b));
    } else {  // eight words of h, then eight of l
        const __m512i half = _mm512_set1_epi32(128);
        const __m512i ha = _mm512_srai_epi32(_mm512_add_epi32(a, half), 8);
        const __m512i hb = _mm512_srai_epi32(_mm512_add_epi32(b, half), 8);
        _mm_store_si128(bytes, _mm512_cvtepi32_epi8(ha));
        _mm_store_si128(bytes + 1, _mm512_cvtepi32_epi8(hb));
        _mm_store_si128(bytes + 2, _mm512_cvtepi32_epi8(_mm512_sub_epi32(a, _mm512_slli_epi32(ha, 8))));
        _mm_store_si128(bytes + 3, _mm512_cvtepi32_epi8(_mm512_sub_epi32(b, _mm512_slli_epi32(hb, 8))));
    }
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}
#else
inline int32_t Activations::quantise_block(const float* v, float inverse, int32_t* out) const {
    alignas(32) int32_t x[kBlock];
    int32_t total = 0;
    for (int i = 0; i < kBlock; i += 8) {
        const __m256i q = _mm256_cvtps_epi32(mul(load(v + i), splat(inverse)));
        _mm256_store_si256((__m256i*)(x + i), q);
    }
    for (int i = 0; i < kBlock; i++) total += x[i];
    if (precision_ == kInt8) {
        int8_t* bytes = (int8_t*)out;
        for (int i = 0; i < kBlock; i++) bytes[i] = int8_t(x[i]);
    } else {  // of each four: the even pair, then the odd pair, as the weights' bytes come apart by mask and by shift
        int16_t* pairs = (int16_t*)out;
        for (int g = 0; g < kBlock; g += 4) {
            pairs[g] = int16_t(x[g]);
            pairs[g + 1] = int16_t(x[g + 2]);
            pairs[g + 2] = int16_t(x[g + 1]);
            pairs[g + 3] = int16_t(x[g + 3]);
        }
    }
    return total;
}
#endif

}  // namespace baton
