// Paged attention over the pool `[block][layer][K,V][token][kv head][head dim]`, fp32, fp16, bf16 or bytes in memory, fp32
// in registers. Bytes are followed, inside each K or V, by a scale in fp16 for each token and kv head: a key's scale
// multiplies its score and a value's its weight, so that the inner loops see bytes as plain numbers.
//
// A generated token's row (decode) is cut into parts of 64 keys at absolute positions; a work item is one part with all
// heads, so that each key is read once and in the order of memory. Its result is a partial softmax; merge_parts adds the
// parts of a row in order. A prompt's rows are cut into tiles of about 96 query rows of one kv head; a work item walks
// over key tiles of 128, also at absolute positions, with an online softmax. Both cuts are independent of what else is in
// the batch and of the chunk's start, so a row's output depends on nothing but its own keys. The two ways add up in
// different orders: a prompt's row takes the second one even when it is alone in its chunk.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace baton {

constexpr int kPart = 64;      // keys of a decode part: K and V of three heads of 64 in fp16 take 48 KB
constexpr int kKeyTile = 128;  // keys of a prompt tile: K^T and V of head_dim 64 take 64 KB of the second-level cache
constexpr int kQueryRows = 96;
constexpr float kNever = -1e30f;  // a masked score: finite, so that differences never become NaN

struct Segment {
    int32_t first_row, num_rows, num_context, is_decode;
};

// One layer of the pool as the kernels see it. Strides count elements.
template <class T>
struct LayerView {
    T* keys;
    T* values;
    i64 block_stride, token_stride, head_stride;
    i64 block_tokens;
    i64 kv_heads;
    i64 half_elements;  // of one layer's K or V in a block, without scales

    // Scales of a token, one for each head: of token `inside` of a block, or of the one at a position.
    static constexpr bool kScaled = std::is_same_v<T, Byte>;
    Half* scales(T* of, i64 block, i64 inside) const {
        return (Half*)(of + block * block_stride + half_elements) + inside * kv_heads;
    }
    Half* scales(T* of, const int32_t* table, i64 position) const {
        return scales(of, i64(table[position / block_tokens]), position % block_tokens);
    }

    // Calls f(t, count, block, inside) for each run of the n positions from `begin` that lies in one block: positions
    // begin + t to begin + t + count are tokens inside, inside + 1, ... of it.
    template <class F>
    void runs(const int32_t* table, i64 begin, int n, const F& f) const {
        i64 block = begin / block_tokens, inside = begin % block_tokens;
        for (int t = 0; t < n; block++, inside = 0) {
            const int count = int(std::min<i64>(block_tokens - inside, n - t));
            f(t, count, i64(table[block]), inside);
            t += count;
        }
    }

    // Offsets of the n positions' first heads.
    void offsets(const int32_t* table, i64 begin, int n, i64* at) const {
        runs(table, begin, n, [&](int t, int count, i64 block, i64 inside) {
            for (int i = 0; i < count; i++) at[t + i] = block * block_stride + (inside + i) * token_stride;
        });
    }

    i64 offset(const int32_t* table, i64 position, i64 head) const {
        return table[position / block_tokens] * block_stride + position % block_tokens * token_stride + head * head_stride;
    }
};

struct AttentionShape {
    i64 heads, kv_heads, head_dim;
    float scale, softcap;  // softcap 0: none

    i64 group() const { return heads / kv_heads; }
    i64 part_floats() const { return heads * (head_dim + 2); }
    i64 tile_tokens() const { return std::max<i64>(8, kQueryRows / group()); }
};

INLINE Vec cap(Vec s, float softcap) {
    return softcap == 0.f ? s : mul(splat(softcap), tanh(mul(s, splat(1.f / softcap))));
}

INLINE i64 first_key(i64 position, i64 window) {  // of the keys that `position` sees
    return window > 0 ? std::max<i64>(0, position - window + 1) : 0;
}

// Scores of H query heads against the four keys at `k`, for one kv head. Here and where values are
// weighed, loops over the array of sums are unrolled by name: GCC leaves it in memory otherwise.
template <class T, int H>
INLINE void score_keys(const float* q, const T* const k[4], i64 dim, float* scores) {
    Vec a[H][4];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) a[h][i] = zero();
    for (i64 d = 0; d < dim; d += VL) {
        Vec qv[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) qv[h] = load(q + h * dim + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Vec key = load(k[i] + d);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) a[h][i] = fma(key, qv[h], a[h][i]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) _mm_storeu_ps(scores + h * kPart, sum4(a[h][0], a[h][1], a[h][2], a[h][3]));
}

// Keys and values of the part that the calling thread computes next, in the order of memory: they come to the
// second-level cache a few lines at a time, evenly, while the part before is computed. A core has some twenty misses under
// way at once and waits for a place where there are more.
class Ahead {
   public:
    Ahead() = default;

    template <class T>
    Ahead(const LayerView<T>& view, const int32_t* table, i64 begin, i64 end) {
        view.runs(table, begin, int(end - begin), [&](int, int count, i64 block, i64 inside) {
            for (T* half : {view.keys, view.values}) {
                add(half + block * view.block_stride + inside * view.token_stride, count * view.token_stride * i64(sizeof(T)));
                if constexpr (view.kScaled) add(view.scales(half, block, inside), count * view.kv_heads * i64(sizeof(Half)));
            }
        });
        if (count_) at_ = ranges_[0].begin;
    }

    // How many lines are due with each of `calls` calls, if half of all are to come with them.
    i64 share(i64 calls) const { return (lines_ / 2 + calls - 1) / std::max<i64>(1, calls); }

    void fetch(i64 lines) {
        for (; lines > 0 && next_ < count_; lines--) {
            _mm_prefetch(at_, _MM_HINT_T1);
            at_ += 64;
            if (at_ >= ranges_[next_].end && ++next_ < count_) at_ = ranges_[next_].begin;
        }
    }

   private:
    void add(const void* begin, i64 bytes) {
        const char* line = (const char*)(uintptr_t(begin) / 64 * 64);
        const char* end = (const char*)begin + bytes;
        lines_ += (end - line + 63) / 64;
        Range* last = count_ ? &ranges_[count_ - 1] : nullptr;
        if (last && line >= last->begin && line <= last->end) {  // values follow keys
            last->end = end;
        } else {
            ranges_[count_++] = {line, end};
        }
    }

    struct Range {
        const char *begin, *end;
    };
    Range ranges_[4 * kPart];
    int count_ = 0, next_ = 0;
    i64 lines_ = 0;
    const char* at_ = nullptr;
};

// out[h] += sum over n keys of scores[h][t] * values[t], for W registers of one kv head's columns; `lines` of what comes
// next are fetched with each key.
template <class T, int H, int W>
INLINE void weigh_values(const float* scores, const T* values, const i64* at, int n, Ahead& ahead, i64 lines, float* out,
                         i64 out_stride) {
    Vec a[H][W];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) a[h][j] = zero();
    for (int t = 0; t < n; t++) {
        const T* v = values + at[t];
        ahead.fetch(lines);
        Vec p[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) p[h] = splat(scores[h * kPart + t]);
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) {
            const Vec column = load(v + j * VL);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) a[h][j] = fma(column, p[h], a[h][j]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) store(out + h * out_stride + j * VL, a[h][j]);
}

// Registers of one pass over the values: the sums of H heads fill the file, and a sum waits for none before it.
template <int H>
constexpr int kColumns = VL == 16 || H < 4 ? 4 : 2;

template <class T, int H>
INLINE void weigh_head(const float* scores, const T* values, const i64* at, int n, Ahead& ahead, i64 lines, i64 dim,
                       float* out) {
    constexpr int W = kColumns<H>;
    i64 d = 0;
    for (; d + W * VL <= dim; d += W * VL) weigh_values<T, H, W>(scores, values + d, at, n, ahead, lines, out + d, dim + 2);
    for (; d < dim; d += VL) weigh_values<T, H, 1>(scores, values + d, at, n, ahead, lines, out + d, dim + 2);
}

// Scores -> exponentials; writes the greatest score and the sum.
inline void soften(const AttentionShape& shape, float* s, int n, float* most, float* total) {
    const int padded = (n + VL - 1) / VL * VL;
    for (int t = n; t < padded; t++) s[t] = 0;
    for (int t = 0; t < padded; t += VL) store(s + t, cap(mul(load(s + t), splat(shape.scale)), shape.softcap));
    for (int t = n; t < padded; t++) s[t] = kNever;
    Vec peak = splat(kNever), sums = zero();
    for (int t = 0; t < padded; t += VL) peak = max(peak, load(s + t));
    *most = max_of(peak);
    for (int t = 0; t < padded; t += VL) store(s + t, exp(sub(load(s + t), splat(*most))));
    for (int t = n; t < padded; t++) s[t] = 0;
    for (int t = 0; t < padded; t += VL) sums = add(sums, load(s + t));
    *total = sum(sums);
}

// Calls f<H>(first head, heads) for a group's query heads, at most four at a time: their sums fill the registers.
template <class F>
INLINE void by_four(i64 group, const F& f) {
    for (i64 h = 0; h < group; h += 4) {
        switch (std::min<i64>(4, group - h)) {
            case 1: f.template operator()<1>(h); break;
            case 2: f.template operator()<2>(h); break;
            case 3: f.template operator()<3>(h); break;
            default: f.template operator()<4>(h); break;
        }
    }
}

// Multiplies each head's number of each of n keys, [head][kPart], by the key's scale. `units` is room for the scales,
// [kv head][kPart]: each is converted once, not for each query head that shares it.
template <class T>
INLINE void rescale(const AttentionShape& shape, const LayerView<T>& view, T* of, const int32_t* table, i64 begin, int n,
                    float* units, float* numbers) {
    view.runs(table, begin, n, [&](int t, int count, i64 block, i64 inside) {
        const Half* scale = view.scales(of, block, inside);
        for (int i = 0; i < count; i++)
            for (i64 h = 0; h < view.kv_heads; h++) units[h * kPart + t + i] = to_float(*scale++);
    });
    const i64 group = shape.group();
    for (i64 h = 0; h < shape.heads; h++) {
        const float* unit = units + h / group * kPart;
        float* number = numbers + h * kPart;
        for (int t = 0; t < n; t += VL) store(number + t, mul(load(number + t), load(unit + t)));
    }
}

// One part of a decode row: keys [begin, end) for all heads, so that a token's keys are read as one stream. Writes max, sum
// and the unnormalised output of each query head. Meanwhile what the thread computes next is fetched: see Ahead.
template <class T>
void decode_part(const AttentionShape& shape, const LayerView<T>& view, const int32_t* table, const float* q, i64 begin,
                 i64 end, Ahead& ahead, float* out) {
    static thread_local std::vector<float> memory;
    const i64 dim = shape.head_dim, group = shape.group();
    const int n = int(end - begin);
    const i64 floats = (shape.heads + (view.kScaled ? shape.kv_heads : 0)) * kPart;
    if (i64(memory.size()) < floats) memory.resize(floats);
    float *scores = memory.data(), *units = scores + shape.heads * kPart;
    i64 at[kPart];
    view.offsets(table, begin, n, at);
    i64 lines = ahead.share((n + 3) / 4 * shape.kv_heads);
    for (int t = 0; t < n; t += 4)
        for (i64 head = 0; head < shape.kv_heads; head++) {
            ahead.fetch(lines);
            const T* k[4];
            for (int i = 0; i < 4; i++) k[i] = view.keys + at[std::min(t + i, n - 1)] + head * view.head_stride;
            by_four(group, [&]<int H>(i64 h) __attribute__((always_inline)) {
                const i64 first = head * group + h;
                score_keys<T, H>(q + first * dim, k, dim, scores + first * kPart + t);
            });
        }
    if constexpr (view.kScaled) rescale(shape, view, view.keys, table, begin, n, units, scores);
    for (i64 h = 0; h < shape.heads; h++)
        soften(shape, scores + h * kPart, n, out + h * (dim + 2), out + h * (dim + 2) + 1);
    if constexpr (view.kScaled) rescale(shape, view, view.values, table, begin, n, units, scores);
    i64 passes = 0;
    by_four(group, [&]<int H>(i64) { passes += dim / (kColumns<H> * VL) + dim % (kColumns<H> * VL) / VL; });
    lines = ahead.share(n * shape.kv_heads * passes);
    for (i64 head = 0; head < shape.kv_heads; head++)
        by_four(group, [&]<int H>(i64 h) __attribute__((always_inline)) {
            const i64 first = head * group + h;
            weigh_head<T, H>(scores + first * kPart, view.values + head * view.head_stride, at, n, ahead, lines, dim,
                             out + first * (dim + 2) + 2);
        });
}

// Adds the parts of one decode row, in order: `parts` is [part][head][max, sum, output].
inline void merge_parts(const AttentionShape& shape, const float* parts, i64 num_parts, float* out) {
    const i64 dim = shape.head_dim, stride = dim + 2, step = shape.part_floats();
    for (i64 h = 0; h < shape.heads; h++, out += dim) {
        const float* p = parts + h * stride;
        float most = kNever, total = 0;
        for (i64 i = 0; i < num_parts; i++) most = std::max(most, p[i * step]);
        for (i64 d = 0; d < dim; d += VL) store(out + d, zero());
        for (i64 i = 0; i < num_parts; i++) {
            const float factor = std::exp(p[i * step] - most);
            total += factor * p[i * step + 1];
            for (i64 d = 0; d < dim; d += VL) store(out + d, fma(splat(factor), load(p + i * step + 2 + d), load(out + d)));
        }
        for (i64 d = 0; d < dim; d += VL) store(out + d, mul(splat(1.f / total), load(out + d)));
    }
}

// C[R, W * VL] (+)= A[R, K] * B[K, W * VL]
template <int R, int W>
INLINE void product(const float* a, i64 lda, const float* b, i64 ldb, i64 k_count, float* c, i64 ldc, bool accumulate) {
    Vec s[R][W];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) s[r][j] = accumulate ? load(c + r * ldc + j * VL) : zero();
    for (i64 k = 0; k < k_count; k++) {
        Vec bv[W];
        for (int j = 0; j < W; j++) bv[j] = load(b + k * ldb + j * VL);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Vec av = splat(a[r * lda + k]);
            for (int j = 0; j < W; j++) s[r][j] = fma(av, bv[j], s[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) store(c + r * ldc + j * VL, s[r][j]);
}

constexpr int kRowGroup = VL == 16 ? 8 : 6;  // rows x 2 registers of sums

// The tile of one work item, and the state of its online softmax.
struct PromptScratch {
    std::vector<float> queries, output, keys, values, most, total;
    alignas(64) float scores[kRowGroup * kKeyTile];

    void shape(i64 rows, i64 dim) {
        queries.resize(rows * dim);
        output.assign(rows * dim, 0.f);
        keys.resize(dim * kKeyTile);
        values.resize(kKeyTile * dim);
        most.assign(rows, kNever);
        total.assign(rows, 0.f);
    }
};

// Fills K^T [dim][kKeyTile] and V [kKeyTile][dim] of keys [begin, begin + n); V is zero up to `padded`.
template <class T>
void load_keys(const AttentionShape& shape, const LayerView<T>& view, const int32_t* table, i64 head, i64 begin, i64 n,
               i64 padded, PromptScratch& s) {
    const i64 dim = shape.head_dim;
    for (i64 t = 0; t < padded; t += 8) {
        i64 at[8];
        __m256 key_scale[8], value_scale[8];
        for (i64 i = 0; i < 8; i++) {
            const i64 position = begin + std::min(t + i, n - 1);
            at[i] = view.offset(table, position, head);
            if constexpr (view.kScaled) {
                key_scale[i] = _mm256_set1_ps(to_float(view.scales(view.keys, table, position)[head]));
                value_scale[i] = _mm256_set1_ps(to_float(view.scales(view.values, table, position)[head]));
            }
        }
        const auto read = [&](const T* of, const __m256* scale, i64 i, i64 d) __attribute__((always_inline)) {
            const __m256 plain = load8(of + at[i] + d);
            if constexpr (view.kScaled) return _mm256_mul_ps(plain, scale[i]);
            return plain;
        };
        for (i64 d = 0; d < dim; d += 8) {
            __m256 rows[8];
            for (int i = 0; i < 8; i++) rows[i] = read(view.keys, key_scale, i, d);
            transpose8(rows, s.keys.data() + d * kKeyTile + t, kKeyTile);
        }
        for (i64 i = 0; i < 8; i++)
            for (i64 d = 0; d < dim; d += 8)
                store8(s.values.data() + (t + i) * dim + d,
                       t + i < n ? read(view.values, value_scale, i, d) : _mm256_setzero_ps());
    }
}

// R query rows from `row` against the loaded keys; the rows' tokens are at positions `position0 + row / group`.
template <int R>
void prompt_rows(const AttentionShape& shape, PromptScratch& s, i64 row, i64 position0, i64 begin, i64 n, i64 window) {
    constexpr int W = 2 * VL;
    const i64 dim = shape.head_dim, group = shape.group();
    const i64 seen_end = std::min(n, position0 + (row + R - 1) / group + 1 - begin);
    const i64 seen_begin = std::max<i64>(0, first_key(position0 + row / group, window) - begin);
    if (seen_end <= seen_begin) return;  // causally later than all these rows, or out of their window
    const i64 c0 = seen_begin / W * W, c1 = (seen_end + W - 1) / W * W;
    const float* q = s.queries.data() + row * dim;
    for (i64 c = c0; c < c1; c += W) product<R, 2>(q, dim, s.keys.data() + c, kKeyTile, dim, s.scores + c, kKeyTile, false);
    float* out = s.output.data() + row * dim;
    for (i64 r = 0; r < R; r++) {
        float* score = s.scores + r * kKeyTile;
        const i64 position = position0 + (row + r) / group;
        const i64 low = std::clamp<i64>(first_key(position, window) - begin, c0, c1);
        const i64 high = std::clamp<i64>(position + 1 - begin, low, std::min(c1, std::max(n, low)));
        if (shape.softcap != 0.f)
            for (i64 t = c0; t < c1; t += VL) store(score + t, cap(load(score + t), shape.softcap));
        for (i64 t = c0; t < low; t++) score[t] = kNever;
        for (i64 t = high; t < c1; t++) score[t] = kNever;
        float& most = s.most[row + r];
        Vec peak = splat(most);
        for (i64 t = c0; t < c1; t += VL) peak = max(peak, load(score + t));
        const float now = max_of(peak);
        if (now == kNever) {  // nothing seen yet: keep the sums at zero
            for (i64 t = c0; t < c1; t++) score[t] = 0;
            continue;
        }
        const float factor = most == now ? 1.f : std::exp(most - now);
        most = now;
        Vec total = zero();
        for (i64 t = c0; t < c1; t += VL) {
            const Vec e = exp(sub(load(score + t), splat(now)));
            total = add(total, e);
            store(score + t, e);
        }
        // exp clamps at -87: what is masked must count for nothing at all.
        for (i64 t = c0; t < low; t++) score[t] = 0;
        for (i64 t = high; t < c1; t++) score[t] = 0;
        s.total[row + r] = s.total[row + r] * factor + sum(total);
        if (factor != 1.f)
            for (i64 d = 0; d < dim; d += VL) store(out + r * dim + d, mul(splat(factor), load(out + r * dim + d)));
    }
    i64 d = 0;
    for (; d + W <= dim; d += W)
        product<R, 2>(s.scores + c0, kKeyTile, s.values.data() + c0 * dim + d, dim, c1 - c0, out + d, dim, true);
    if (d < dim)
        product<R, 1>(s.scores + c0, kKeyTile, s.values.data() + c0 * dim + d, dim, c1 - c0, out + d, dim, true);
}

// Query tokens [token0, token0 + num_tokens) of a chunk against all they see. `q` and `out` point at the tile's first
// token and kv head `head`'s first query head; strides count floats between tokens.
template <class T>
void prompt_tile(const AttentionShape& shape, const LayerView<T>& view, const int32_t* table, i64 head, i64 position0,
                 i64 num_tokens, i64 window, const float* q, i64 q_stride, float* out, i64 out_stride) {
    static thread_local PromptScratch s;
    const i64 dim = shape.head_dim, group = shape.group(), rows = num_tokens * group, end = position0 + num_tokens;
    s.shape(rows, dim);
    for (i64 r = 0; r < rows; r++)
        for (i64 d = 0; d < dim; d += VL)
            store(s.queries.data() + r * dim + d, mul(splat(shape.scale), load(q + r / group * q_stride + r % group * dim + d)));
    for (i64 begin = first_key(position0, window) / kKeyTile * kKeyTile; begin < end; begin += kKeyTile) {
        const i64 n = std::min<i64>(kKeyTile, end - begin), padded = (n + 2 * VL - 1) / (2 * VL) * (2 * VL);
        load_keys(shape, view, table, head, begin, n, padded, s);
        i64 row = 0;
        for (; row + kRowGroup <= rows; row += kRowGroup) prompt_rows<kRowGroup>(shape, s, row, position0, begin, n, window);
        for (; row + 2 <= rows; row += 2) prompt_rows<2>(shape, s, row, position0, begin, n, window);
        for (; row < rows; row++) prompt_rows<1>(shape, s, row, position0, begin, n, window);
    }
    for (i64 r = 0; r < rows; r++)
        for (i64 d = 0; d < dim; d += VL)
            store(out + r / group * out_stride + r % group * dim + d,
                  mul(splat(1.f / s.total[r]), load(s.output.data() + r * dim + d)));
}

}  // namespace baton
