// The C interface: plain structs that native.py mirrors field by field.
#pragma once
#include "matrix.h"

namespace baton {

struct LayerDesc {
    Matrix qkv, output, gate_up, down;
    const float* attention_norm;
    const float* mlp_norm;
    const float* post_attention_norm;  // null: none; else the block's output is normalised before it is added
    const float* post_mlp_norm;
    const float* qkv_bias;  // null: none
    const float* output_bias;
    const float* gate_up_bias;  // laid out as the matrix's rows are
    const float* down_bias;
    const float* query_norm;
    const float* key_norm;
    i64 window;  // 0: sees everything
    i64 rope;    // which of the two rotary embeddings
};

struct ModelDesc {
    i64 hidden, heads, kv_heads, head_dim, intermediate, vocab, num_layers, threads;
    i64 gelu;
    float epsilon, embed_factor, attention_scale, attention_softcap, logit_softcap;
    float rope_factor[2];
    const float* inverse_frequencies[2];  // head_dim / 2 each
    const float* final_norm;
    Matrix embedding, head;
    const LayerDesc* layers;
};

enum KvFormat : i64 { kKvFloat = 0, kKvHalf = 1, kKvBrain = 2, kKvByte = 3 };  // as in native.py

struct StepDesc {
    i64 num_tokens, num_segments, table_width, num_logit_rows, logits_stride;
    const i64* token_ids;
    const i64* positions;
    const i64* slots;
    const int32_t* segments;  // [num_segments][first row, rows, context, whether a generated token]
    const int32_t* block_tables;
    const i64* logit_rows;
    float* logits;
    i64 num_greedy_rows;
    const i64* greedy_rows;
    i64* winners;  // [num_greedy_rows]
    void* pool;
    i64 num_blocks, num_pool_layers, block_tokens, kv_format;
    i64 num_marks;
    const i64* marks;             // ascending: after so many layers `layers_done` is called, on the caller's thread
    void (*layers_done)(i64);
};

}  // namespace baton
