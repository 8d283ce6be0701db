// The model's head: logits of some rows, and of others only the token with the greatest.
//
// A row's logits are needed by whoever samples; a greedy row's are not, so they never leave the first-level cache: a
// tile's 16 columns are compared with the greatest that each lane has seen in this chunk of panels. A chunk leaves one
// candidate for each row, and the row's winner is the best of them. Written and read again, 64 rows of a vocabulary of
// 49,152 would be 25 MB of traffic, in memory that the kernel has to hand out page by page.
#pragma once
#include <vector>

#include "attention.h"
#include "gemm.h"

namespace baton {

// A logit and its column. NaN counts as the greatest, as in torch.argmax, and among equals the first column wins.
struct Candidate {
    float value;
    i64 column;

    bool loses_to(const Candidate& other) const {
        const bool here = std::isnan(value), there = std::isnan(other.value);
        if (here || there) return there && (!here || other.column < column);
        return other.value > value || (other.value == value && other.column < column);
    }
};

// What the 16 lanes of a row have seen: the greatest value of each and the panel it came from. Panels come in
// ascending order, so that the first among equals stays.
struct Lanes {
    alignas(64) float most[kPanel];
    alignas(64) float panel[kPanel];  // exact below 2^24 panels

    void start(i64 first_panel) {
        for (int c = 0; c < kPanel; c++) most[c] = -INFINITY, panel[c] = float(first_panel);
    }

    void see(const float* values, i64 from) {
        for (int c = 0; c < kPanel; c += VL) keep_greater(load(values + c), splat(float(from)), most + c, panel + c);
    }

    Candidate best() const {
        Candidate found{most[0], i64(panel[0]) * kPanel};
        for (int c = 1; c < kPanel; c++) {
            const Candidate other{most[c], i64(panel[c]) * kPanel + c};
            if (found.loses_to(other)) found = other;
        }
        return found;
    }
};

// The first `num_logit_rows` rows of `a` get their logits, the rest winners.
struct HeadOutput {
    i64 vocab;
    float softcap;
    i64 num_logit_rows;
    float* logits;
    i64 stride;
    i64* winners;
};

class Head {
   public:
    void run(Team& team, const Activations& a, const Matrix& m, const HeadOutput& out) {
        const i64 panels = m.n / kPanel, grain = panel_grain(team, panels);
        const i64 greedy = a.rows() - out.num_logit_rows;
        team.share(panels, grain, [&](i64 begin, i64 end) { chunk(a, m, out, begin, end, found_.data() + begin / grain * greedy); });
        team.share(greedy, 16, [&](i64 begin, i64 end) {
            for (i64 row = begin; row < end; row++) out.winners[row] = winner(row, greedy, team.size() == 1 ? 1 : (panels + grain - 1) / grain);
        });
    }

    // Makes room; called by one thread, before `run`.
    void prepare(const Team& team, const Matrix& m, i64 greedy) {
        const i64 panels = m.n / kPanel, grain = panel_grain(team, panels);
        const i64 floats = (panels + grain - 1) / grain * greedy;
        if (i64(found_.size()) < floats) found_.resize(floats);
    }

   private:
    static void chunk(const Activations& a, const Matrix& m, const HeadOutput& out, i64 begin, i64 end, Candidate* found) {
        static thread_local std::vector<Lanes> lanes;
        const i64 greedy = a.rows() - out.num_logit_rows;
        if (i64(lanes.size()) < greedy) lanes.resize(greedy);
        for (i64 row = 0; row < greedy; row++) lanes[row].start(begin);
        alignas(64) float tile_out[kTileRows * kPanel];
        each_tile(a, begin, end, [&](i64 panel, i64 tile) __attribute__((always_inline)) {
            run_tile(a, m, panel, tile, tile_out, kPanel, false);
            float* values = tile_out;
            for (i64 row = a.tile_begin(tile); row < a.tile_begin(tile + 1); row++, values += kPanel) {
                if (out.softcap != 0.f)
                    for (int c = 0; c < kPanel; c += VL) store(values + c, cap(load(values + c), out.softcap));
                if (row < out.num_logit_rows) {
                    std::memcpy(out.logits + row * out.stride + panel * kPanel, values, sizeof(float) * kPanel);
                    continue;
                }
                for (i64 c = std::max<i64>(0, out.vocab - panel * kPanel); c < kPanel; c++) values[c] = -INFINITY;  // padding
                lanes[row - out.num_logit_rows].see(values, panel);
            }
        });
        for (i64 row = 0; row < greedy; row++) found[row] = lanes[row].best();
    }

    i64 winner(i64 row, i64 greedy, i64 chunks) const {
        Candidate best = found_[row];
        for (i64 chunk = 1; chunk < chunks; chunk++)
            if (best.loses_to(found_[chunk * greedy + row])) best = found_[chunk * greedy + row];
        return best.column;
    }

    std::vector<Candidate> found_;  // [chunk of panels][greedy row]
};

}  // namespace baton
