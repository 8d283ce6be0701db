// A whole step: embedding, every layer, head. One parallel region; each phase of a layer ends in a barrier.
//
//   rows    x -> norm -> quantise                 heads   attention parts and tiles
//   gemm    q, k, v                               rows    merge parts -> quantise
//   rows    bias, norm, rotate; K, V -> pool      gemm    output (added to x)
//                                                 rows    norm -> quantise; gemm gate, up; rows act; gemm down
#include <exception>
#include <new>

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "head.h"
#include "model.h"
#include "team.h"

namespace baton {

// One piece of attention work: a tile of prompt rows, or a part of a decode row's keys.
struct Work {
    int32_t segment, head;
    int32_t first, count;  // tile: rows of the segment; part: keys
    i64 partial;           // part: where its result goes, in floats; tile: -1
};

// Attention work of layers with the same window.
struct Plan {
    i64 window = -1;
    std::vector<Work> work;
    std::vector<i64> parts;    // of each segment: 0 for a prompt
    std::vector<i64> partial;  // of each segment: first float of its parts
    i64 partial_floats = 0;
    i64 grain = 1;  // work items taken at a time
};

class Model {
   public:
    explicit Model(const ModelDesc& desc)
        : desc_(desc),
          layers_(desc.layers, desc.layers + desc.num_layers),
          shape_{desc.heads, desc.kv_heads, desc.head_dim, desc.attention_scale, desc.attention_softcap},
          team_(int(desc.threads)) {}

    // Returns null, or what is wrong with the input; nothing was computed then.
    const char* step(const StepDesc& s) {
        if (const char* problem = check(s)) return problem;
        caller_ = std::this_thread::get_id();
        prepare(s);
        switch (s.kv_format) {
            case kKvFloat: team_.run([&] { forward<float>(s); }); break;
            case kKvHalf: team_.run([&] { forward<Half>(s); }); break;
            case kKvBrain: team_.run([&] { forward<Brain>(s); }); break;
            default: team_.run([&] { forward<Byte>(s); });
        }
        return nullptr;
    }

   private:
    const char* check(const StepDesc& s) const {
        for (i64 t = 0; t < s.num_tokens; t++) {
            if (s.token_ids[t] < 0 || s.token_ids[t] >= desc_.vocab) return "a token id is beyond the vocabulary";
            if (s.slots[t] < 0 || s.slots[t] >= s.num_blocks * s.block_tokens) return "a slot is beyond the pool";
        }
        i64 row = 0;
        for (i64 i = 0; i < s.num_segments; i++) {
            const Segment& segment = segments(s)[i];
            if (segment.first_row != row || segment.num_rows < 1 || segment.num_context < 0) return "segments are not in order";
            if (segment.is_decode && segment.num_rows != 1) return "a generated token is not alone in its segment";
            row += segment.num_rows;
            const i64 blocks = (segment.num_context + segment.num_rows + s.block_tokens - 1) / s.block_tokens;
            if (blocks > s.table_width) return "a block table is too short";
            for (i64 b = 0; b < blocks; b++) {
                const int32_t block = s.block_tables[i * s.table_width + b];
                if (block < 0 || block >= s.num_blocks) return "a block id is beyond the pool";
            }
        }
        if (row != s.num_tokens) return "segments do not cover the tokens";
        for (i64 r = 0; r < s.num_logit_rows; r++)
            if (s.logit_rows[r] < 0 || s.logit_rows[r] >= s.num_tokens) return "a logit row is beyond the batch";
        for (i64 r = 0; r < s.num_greedy_rows; r++)
            if (s.greedy_rows[r] < 0 || s.greedy_rows[r] >= s.num_tokens) return "a greedy row is beyond the batch";
        if (s.kv_format < kKvFloat || s.kv_format > kKvByte) return "the pool has an unknown format";
        if (s.num_pool_layers != desc_.num_layers) return "the pool has another number of layers";
        return nullptr;
    }

    static const Segment* segments(const StepDesc& s) { return (const Segment*)s.segments; }

    i64 qkv_width() const { return (desc_.heads + 2 * desc_.kv_heads) * desc_.head_dim; }
    i64 attention_width() const { return padded(desc_.heads * desc_.head_dim); }
    i64 intermediate_width() const { return padded(desc_.intermediate); }

    void prepare(const StepDesc& s) {
        const i64 rows = s.num_tokens;
        const auto grow = [](std::vector<float>& v, i64 n) {
            if (i64(v.size()) < n) v.resize(n);
        };
        grow(x_, rows * padded(desc_.hidden));
        grow(block_, rows * padded(desc_.hidden));
        grow(qkv_, rows * padded(qkv_width()));
        grow(attention_, rows * attention_width());
        grow(gate_up_, rows * 2 * intermediate_width());
        for (auto& angles : angles_) grow(angles, rows * desc_.head_dim);
        const Matrix head = desc_.head;
        const LayerDesc& first = layers_[0];
        qkv_in_.shape(rows, padded(desc_.hidden), Precision(first.qkv.precision));
        output_in_.shape(rows, attention_width(), Precision(first.output.precision));
        gate_up_in_.shape(rows, padded(desc_.hidden), Precision(first.gate_up.precision));
        down_in_.shape(rows, intermediate_width(), Precision(first.down.precision));
        head_in_.shape(std::max<i64>(1, s.num_logit_rows + s.num_greedy_rows), padded(desc_.hidden), Precision(head.precision));
        head_.prepare(team_, head, s.num_greedy_rows);
        row_segment_.resize(rows);
        for (i64 i = 0; i < s.num_segments; i++)
            for (i64 r = 0; r < segments(s)[i].num_rows; r++) row_segment_[segments(s)[i].first_row + r] = int32_t(i);
        plans_.clear();
        i64 partial_floats = 0;
        for (const LayerDesc& layer : layers_) {
            bool known = false;
            for (const Plan& plan : plans_) known |= plan.window == layer.window;
            if (known) continue;
            plans_.push_back(make_plan(s, layer.window));
            partial_floats = std::max(partial_floats, plans_.back().partial_floats);
        }
        grow(partial_, partial_floats);
    }

    Plan make_plan(const StepDesc& s, i64 window) const {
        Plan plan;
        plan.window = window;
        plan.parts.assign(s.num_segments, 0);
        plan.partial.assign(s.num_segments, 0);
        const i64 tokens = shape_.tile_tokens();
        for (i64 i = 0; i < s.num_segments; i++) {
            const Segment& segment = segments(s)[i];
            const i64 end = segment.num_context + segment.num_rows;
            if (!segment.is_decode) {  // last tiles first: they see the most keys
                for (i64 first = (segment.num_rows - 1) / tokens * tokens; first >= 0; first -= tokens)
                    for (i64 head = 0; head < desc_.kv_heads; head++)
                        plan.work.push_back({int32_t(i), int32_t(head), int32_t(first),
                                             int32_t(std::min(tokens, segment.num_rows - first)), -1});
                continue;
            }
            plan.partial[i] = plan.partial_floats;
            for (i64 begin = first_key(end - 1, window); begin < end;) {
                const i64 stop = std::min(end, (begin / kPart + 1) * kPart);
                plan.work.push_back({int32_t(i), 0, int32_t(begin), int32_t(stop - begin), plan.partial_floats});
                plan.partial_floats += shape_.part_floats();
                plan.parts[i]++;
                begin = stop;
            }
        }
        // Parts follow each other best where they lie; tiles are long enough alone.
        if (plan.partial_floats == i64(plan.work.size()) * shape_.part_floats())
            plan.grain = std::clamp<i64>(i64(plan.work.size()) / (8 * team_.size()), 1, 8);
        return plan;
    }

    // Runs on every thread of the team.
    template <class T>
    void forward(const StepDesc& s) {
        embed(s);
        const i64* mark = s.marks;
        for (i64 l = 0; l < desc_.num_layers; l++) {
            layer<T>(s, layers_[l], view<T>(s, l));
            if (mark == s.marks + s.num_marks || *mark != l + 1) continue;
            mark++;
            // Every thread has passed the barriers behind this layer's K and V.
            if (std::this_thread::get_id() == caller_) s.layers_done(l + 1);
        }
        answer(s);
    }

    template <class T>
    LayerView<T> view(const StepDesc& s, i64 layer) const {
        const i64 token = desc_.kv_heads * desc_.head_dim, elements = s.block_tokens * token;
        const i64 half = elements + (LayerView<T>::kScaled ? s.block_tokens * desc_.kv_heads * i64(sizeof(Half)) : 0);
        T* keys = (T*)s.pool + layer * 2 * half;
        return {keys,           keys + half,   desc_.num_layers * 2 * half, token, desc_.head_dim,
                s.block_tokens, desc_.kv_heads, elements};
    }

    i64 row_grain(i64 rows) const { return std::max<i64>(1, std::min<i64>(16, rows / (4 * team_.size()))); }

    template <class F>
    void rows(i64 count, const F& f) {
        team_.share(count, row_grain(count), [&](i64 begin, i64 end) {
            for (i64 row = begin; row < end; row++) f(row);
        });
    }

    static float* scratch(i64 floats) {
        static thread_local std::vector<float> memory;
        if (i64(memory.size()) < floats) memory.resize(floats);
        return memory.data();
    }

    void embed(const StepDesc& s) {
        const i64 dim = desc_.head_dim, half = dim / 2;
        rows(s.num_tokens, [&](i64 row) {
            embed_row(desc_.embedding, s.token_ids[row], desc_.embed_factor, x(row));
            for (int which = 0; which < 2; which++) {
                float* out = angles_[which].data() + row * dim;
                if (which == 1 && desc_.inverse_frequencies[1] == desc_.inverse_frequencies[0]) break;
                for (i64 i = 0; i < half; i++) {
                    const double angle = float(s.positions[row]) * desc_.inverse_frequencies[which][i];
                    out[i] = float(std::cos(angle)) * desc_.rope_factor[which];
                    out[half + i] = float(std::sin(angle)) * desc_.rope_factor[which];
                }
            }
        });
    }

    float* x(i64 row) { return x_.data() + row * padded(desc_.hidden); }
    float* block(i64 row) { return block_.data() + row * padded(desc_.hidden); }

    template <class T>
    void layer(const StepDesc& s, const LayerDesc& layer, const LayerView<T>& view) {
        const i64 count = s.num_tokens;
        normalise(count, layer.attention_norm, qkv_in_);
        gemm(team_, qkv_in_, layer.qkv, qkv_.data(), qkv_width(), false);
        place(s, layer, view);
        attend(s, layer, view);
        project(count, output_in_, layer.output, layer.output_bias, layer.post_attention_norm);
        normalise(count, layer.mlp_norm, gate_up_in_);
        gemm(team_, gate_up_in_, layer.gate_up, gate_up_.data(), 2 * intermediate_width(), false);
        rows(count, [&](i64 row) {
            float* out = scratch(intermediate_width());
            float* both = gate_up_.data() + row * 2 * intermediate_width();
            if (layer.gate_up_bias) add_row(both, layer.gate_up_bias, 2 * intermediate_width());
            gated(both, intermediate_width(), desc_.gelu, out);
            down_in_.set_row(row, out);
        });
        project(count, down_in_, layer.down, layer.down_bias, layer.post_mlp_norm);
    }

    void normalise(i64 count, const float* weight, Activations& out) {
        rows(count, [&](i64 row) {
            float* normal = scratch(padded(desc_.hidden));
            rms_norm(x(row), weight, desc_.hidden, desc_.epsilon, normal);
            out.set_row(row, normal);
        });
    }

    // x += in * matrix + bias, normalised in between where the family does so.
    void project(i64 count, const Activations& in, const Matrix& matrix, const float* bias, const float* norm) {
        const i64 hidden = padded(desc_.hidden);
        gemm(team_, in, matrix, norm ? block_.data() : x_.data(), hidden, norm == nullptr);
        if (bias) rows(count, [&](i64 row) { add_row(norm ? block(row) : x(row), bias, desc_.hidden); });
        if (!norm) return;
        rows(count, [&](i64 row) {
            float* normal = scratch(hidden);
            rms_norm(block(row), norm, desc_.hidden, desc_.epsilon, normal);
            add_row(x(row), normal, desc_.hidden);
        });
    }

    // Bias, query and key norms, rotation; keys and values to the pool.
    template <class T>
    void place(const StepDesc& s, const LayerDesc& layer, const LayerView<T>& view) {
        const i64 dim = desc_.head_dim, width = qkv_width();
        rows(s.num_tokens, [&](i64 row) {
            float* q = qkv_.data() + row * width;
            float* k = q + desc_.heads * dim;
            if (layer.qkv_bias)
                for (i64 i = 0; i < width; i += VL) store(q + i, add(load(q + i), load(layer.qkv_bias + i)));
            const float* angles = angles_[layer.rope].data() + row * dim;
            for (i64 h = 0; h < desc_.heads + desc_.kv_heads; h++) {
                const float* norm = h < desc_.heads ? layer.query_norm : layer.key_norm;
                if (norm) head_norm(q + h * dim, norm, dim, desc_.epsilon);
                rotate(q + h * dim, angles, angles + dim / 2, dim);
            }
            write_kv(view, s.slots[row], k, k + desc_.kv_heads * dim, dim);
        });
    }

    template <class T>
    void attend(const StepDesc& s, const LayerDesc& layer, const LayerView<T>& view) {
        const Plan& plan = plan_of(layer.window);
        const i64 dim = desc_.head_dim, width = qkv_width(), group = shape_.group();
        const i64 count = i64(plan.work.size());
        team_.walk(count, plan.grain, [&](i64 i, i64 following) {
            const Work& work = plan.work[i];
            const Segment& segment = segments(s)[work.segment];
            const int32_t* table = s.block_tables + work.segment * s.table_width;
            if (work.partial >= 0) {
                Ahead ahead = following < count ? ahead_of(s, view, plan.work[following]) : Ahead();
                decode_part(shape_, view, table, qkv_.data() + segment.first_row * width, work.first,
                            work.first + work.count, ahead, partial_.data() + work.partial);
                return;
            }
            const i64 row = segment.first_row + work.first;
            prompt_tile(shape_, view, table, work.head, segment.num_context + work.first, work.count, layer.window,
                        qkv_.data() + row * width + work.head * group * dim, width,
                        attention_.data() + row * attention_width() + work.head * group * dim, attention_width());
        });
        rows(s.num_tokens, [&](i64 row) {
            float* out = attention_.data() + row * attention_width();
            const i64 segment = row_segment_[row];
            if (plan.parts[segment]) merge_parts(shape_, partial_.data() + plan.partial[segment], plan.parts[segment], out);
            output_in_.set_row(row, out);
        });
    }

    template <class T>
    Ahead ahead_of(const StepDesc& s, const LayerView<T>& view, const Work& work) const {
        if (work.partial < 0) return {};  // a tile of a prompt reads each key many times
        return {view, s.block_tables + work.segment * s.table_width, work.first, work.first + work.count};
    }

    const Plan& plan_of(i64 window) const {
        for (const Plan& plan : plans_)
            if (plan.window == window) return plan;
        std::terminate();
    }

    void answer(const StepDesc& s) {
        const i64 count = s.num_logit_rows + s.num_greedy_rows;
        if (count == 0) return;
        rows(count, [&](i64 row) {
            const i64 token = row < s.num_logit_rows ? s.logit_rows[row] : s.greedy_rows[row - s.num_logit_rows];
            float* normal = scratch(padded(desc_.hidden));
            rms_norm(x(token), desc_.final_norm, desc_.hidden, desc_.epsilon, normal);
            head_in_.set_row(row, normal);
        });
        head_.run(team_, head_in_, desc_.head,
                  {desc_.vocab, desc_.logit_softcap, s.num_logit_rows, s.logits, s.logits_stride, s.winners});
    }

    const ModelDesc desc_;
    const std::vector<LayerDesc> layers_;
    const AttentionShape shape_;
    Team team_;
    std::thread::id caller_;
    std::vector<float> x_, block_, qkv_, attention_, gate_up_, partial_, angles_[2];
    std::vector<int32_t> row_segment_;
    std::vector<Plan> plans_;
    Head head_;
    Activations qkv_in_, output_in_, gate_up_in_, down_in_, head_in_;
};

}  // namespace baton

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT void* baton_create(const baton::ModelDesc* desc) {
    try {
        return new baton::Model(*desc);
    } catch (const std::exception&) {
        return nullptr;
    }
}

// Returns null, or a static text that says what is wrong.
EXPORT const char* baton_step(void* model, const baton::StepDesc* step) {
    try {
        return static_cast<baton::Model*>(model)->step(*step);
    } catch (const std::bad_alloc&) {
        return "out of memory";
    }
}

EXPORT void baton_destroy(void* model) { delete static_cast<baton::Model*>(model); }
}
