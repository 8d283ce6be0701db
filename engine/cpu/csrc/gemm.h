// out[rows, N] (+)= activations[rows, K] * matrix[N, K]^T, shared among the team by panels of 16 columns.
//
// A thread takes a chunk of panels and, for one pass of rows at a time, runs each panel over all tiles of the pass: the
// panel (K = 576: 6 KB in 4 bits) stays in the first-level cache, the pass's activations in the second. With one tile
// (decode) this is one walk through the weights at memory speed; with a few, weights come from memory while the tiles
// before them are computed.
#pragma once
#include "matrix.h"
#include "team.h"
#ifdef BATON_AVX512
#include "tiles_avx512.h"
#else
#include "tiles_avx2.h"
#endif

namespace baton {

constexpr i64 kPassTiles = 12;
constexpr i64 kAheadBytes = 3072;
// Chunks for each thread: few enough to cost nothing, enough that a disturbed thread is not waited for.
constexpr i64 kChunksPerThread = 6;

using TileFunction = void (*)(const Tile&);

template <int R>
TileFunction tile_function(const Matrix& m) {
    if (m.format == kFp32) return &tile_fp32<R>;
    if (m.format == kQ4) return m.precision == kInt16 ? &tile_q4<R, true> : &tile_q4<R, false>;
    return &tile_w8<R>;
}

INLINE TileFunction tile_function(const Matrix& m, i64 rows) {
    switch (rows) {
        case 1: return tile_function<1>(m);
        case 2: return tile_function<2>(m);
        case 3: return tile_function<3>(m);
        case 4: return tile_function<4>(m);
        case 5: return tile_function<5>(m);
        case 6: return tile_function<6>(m);
#ifdef BATON_AVX512
        case 7: return tile_function<7>(m);
        case 8: return tile_function<8>(m);
        case 9: return tile_function<9>(m);
        case 10: return tile_function<10>(m);
        case 11: return tile_function<11>(m);
        case 12: return tile_function<12>(m);
#endif
        default: return nullptr;
    }
}

// How far ahead weights are fetched while a tile is computed. The first tile of a pass brings them from memory: what it
// needs soon if it is the only one, else the next panel, as this panel is in the cache for the tiles that follow.
INLINE i64 fetch_distance(const Activations& a, const Matrix& m, i64 tile) {
    if (tile % kPassTiles) return 0;
    return a.num_tiles() - tile == 1 ? kAheadBytes : m.panel_bytes();
}

// One tile of rows times one panel of columns; `out` is the tile's own corner.
INLINE void run_tile(const Activations& a, const Matrix& m, i64 panel, i64 tile, float* out, i64 stride, bool accumulate) {
    const i64 row = a.tile_begin(tile);
    const Tile t{a.values(row),  a.scales(row),
                 a.sums(row),    a.offsets(row),
                 m.data + panel * m.panel_bytes(), m.k / kBlock,
                 out,            stride,
                 accumulate,     fetch_distance(a, m, tile)};
    tile_function(m, a.tile_begin(tile + 1) - row)(t);
}

// Calls f(panel, tile) for every tile of the panels [begin, end), pass by pass.
template <class F>
INLINE void each_tile(const Activations& a, i64 begin, i64 end, const F& f) {
    for (i64 pass = 0; pass < a.num_tiles(); pass += kPassTiles) {
        const i64 last = std::min(a.num_tiles(), pass + kPassTiles);
        for (i64 panel = begin; panel < end; panel++)
            for (i64 tile = pass; tile < last; tile++) f(panel, tile);
    }
}

inline i64 panel_grain(const Team& team, i64 panels) { return std::max<i64>(1, panels / (team.size() * kChunksPerThread)); }

inline void gemm(Team& team, const Activations& a, const Matrix& m, float* out, i64 stride, bool accumulate) {
    const i64 panels = m.n / kPanel;
    team.share(panels, panel_grain(team, panels), [&](i64 begin, i64 end) {
        each_tile(a, begin, end, [&](i64 panel, i64 tile) __attribute__((always_inline)) {
            run_tile(a, m, panel, tile, out + a.tile_begin(tile) * stride + panel * kPanel, stride, accumulate);
        });
    });
}

// One row of an embedding, read back from its packed matrix.
inline void embed_row(const Matrix& m, i64 row, float factor, float* out) {
    const uint8_t* panel = m.data + row / kPanel * m.panel_bytes();
    const i64 c = row % kPanel;
    for (i64 b = 0; b < m.k / kBlock; b++, out += kBlock) {
        const uint8_t* w = panel + b * m.block_bytes();
        if (m.format == kFp32) {
            for (int k = 0; k < kBlock; k++) out[k] = factor * ((const float*)w)[k * kPanel + c];
            continue;
        }
        const float d = to_float(((const Half*)w)[c]);
        if (m.format == kW8) {
            for (int k = 0; k < kBlock; k++) out[k] = factor * (d * float(w[32 + k / 4 * 64 + c * 4 + k % 4] - 128));
            continue;
        }
        const float least = to_float(((const Half*)w)[16 + c]);
        for (int k = 0; k < 16; k++) {
            const uint8_t both = w[64 + k / 4 * 64 + c * 4 + k % 4];
            out[k] = factor * (d * float(both & 15) + least);
            out[k + 16] = factor * (d * float(both >> 4) + least);
        }
    }
}

}  // namespace baton
