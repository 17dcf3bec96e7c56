// The forward pass of a ragged batch, one call per step. `../abi.py` mirrors the structs.
//
// The whole pass is one parallel region; every function called inside is worked on by the team together and
// ends with a barrier.
#include <omp.h>

#include <limits>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"

namespace hortator {

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm, k_norm: null if the model has none
    Matrix qkv, out, gate_up, down;                          // gate_up: panels of gate and up in turn
};

struct Model {
    int64_t hidden, intermediate, heads, kv_heads, head_dim, layers, block_tokens;
    int64_t half_weights, half_kv;
    float eps;
    const float *cos, *sin;  // [max_len, head_dim / 2]
    const Layer* layer;
    Matrix embed, head;
    const float* norm;
    void* kv;
    int64_t threads;
};

struct Batch {
    int64_t tokens, rows, table_width, logits;
    const int32_t *ids, *positions, *row_start, *kv_len, *table, *write_block, *write_offset, *logit_tokens;
};

// Activations, [tokens, …] each; act's rows are rounded up to a panel.
struct Buffers {
    float *x, *normed, *qkv, *attended, *act;
};

// Attention work of one task: tokens [first, first + count) of a row, for one KV head.
struct Task {
    int32_t row, head, first, count;
};

class Pass {
  public:
    Pass(const Model& model, const Batch& batch, const Buffers& buffers, float* logits)
        : m_(model), b_(batch), buf_(buffers), logits_(logits) {
        q_size_ = m_.heads * m_.head_dim;
        kv_size_ = m_.kv_heads * m_.head_dim;
        ld_qkv_ = q_size_ + 2 * kv_size_;
        ld_act_ = panels_of(m_.intermediate) * kPanel;
        group_ = m_.heads / m_.kv_heads;
        plan_attention();
    }

    template <class W, class T>
    void run() {
#pragma omp parallel num_threads(int(m_.threads))
        {
            std::vector<float> memory(AttentionScratch::floats(most_queries_, m_.head_dim));
            const AttentionScratch scratch(memory.data(), most_queries_, m_.head_dim);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < b_.tokens; t++) unpack_row<W>(m_.embed, b_.ids[t], buf_.x + t * m_.hidden);
            for (int64_t i = 0; i < m_.layers; i++) {
                attention_half<W, T>(i, scratch);
                feed_forward_half<W>(m_.layer[i]);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < b_.logits; i++) {
                rms_norm(buf_.x + b_.logit_tokens[i] * m_.hidden, m_.norm, m_.hidden, m_.eps,
                         buf_.normed + i * m_.hidden);
            }
            multiply<W>(m_.head, b_.logits, buf_.normed, m_.hidden, logits_, panels_of(m_.head.n) * kPanel,
                        Into::kStore);
        }
    }

  private:
    template <class W, class T>
    void attention_half(int64_t index, const AttentionScratch& scratch) {
        const Layer& layer = m_.layer[index];
        const int64_t dim = m_.head_dim;
        const int64_t per_layer = 2 * m_.kv_heads * m_.block_tokens * dim;
        const Pages pages{m_.kv, m_.layers * per_layer, index * per_layer, m_.kv_heads, m_.block_tokens, dim};
        norm_all(layer.input_norm);
        multiply<W>(layer.qkv, b_.tokens, buf_.normed, m_.hidden, buf_.qkv, ld_qkv_, Into::kStore);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < b_.tokens; t++) place<T>(layer, pages, t);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks_.size(); i++) {
            const Task& task = tasks_[i];
            const int64_t token = b_.row_start[task.row] + task.first;
            const int64_t at = task.head * group_ * dim;
            attend<T>(pages, b_.table + task.row * b_.table_width, task.head, group_, b_.positions[token], task.count,
                      buf_.qkv + token * ld_qkv_ + at, ld_qkv_, buf_.attended + token * q_size_ + at, q_size_, scratch);
        }
        multiply<W>(layer.out, b_.tokens, buf_.attended, q_size_, buf_.x, m_.hidden, Into::kAdd);
    }

    template <class W>
    void feed_forward_half(const Layer& layer) {
        norm_all(layer.post_norm);
        multiply_silu<W>(layer.gate_up, b_.tokens, buf_.normed, m_.hidden, buf_.act, ld_act_);
        multiply<W>(layer.down, b_.tokens, buf_.act, ld_act_, buf_.x, m_.hidden, Into::kAdd);
    }

    void norm_all(const float* weight) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < b_.tokens; t++) {
            rms_norm(buf_.x + t * m_.hidden, weight, m_.hidden, m_.eps, buf_.normed + t * m_.hidden);
        }
    }

    // Normalise and rotate the heads of token t, and put its k and v into the cache.
    template <class T>
    void place(const Layer& layer, const Pages& pages, int64_t t) {
        const int64_t dim = m_.head_dim;
        const float* cos = m_.cos + b_.positions[t] * dim / 2;
        const float* sin = m_.sin + b_.positions[t] * dim / 2;
        float* row = buf_.qkv + t * ld_qkv_;
        for (int64_t h = 0; h < m_.heads + m_.kv_heads; h++) {
            const float* weight = h < m_.heads ? layer.q_norm : layer.k_norm;
            if (weight) rms_norm(row + h * dim, weight, dim, m_.eps, row + h * dim);
            rotate(row + h * dim, cos, sin, dim);
        }
        for (int64_t h = 0; h < m_.kv_heads; h++) {
            for (int which = 0; which < 2; which++) {
                write_head(row + q_size_ + which * kv_size_ + h * dim, dim,
                           pages.at<T>(b_.write_block[t], which, h, b_.write_offset[t]));
            }
        }
    }

    void plan_attention() {
        const int64_t tile = std::max<int64_t>(1, std::min<int64_t>(kQueryTokens, kMaxQueries / group_));
        for (int64_t r = 0; r < b_.rows; r++) {
            const int32_t count = b_.row_start[r + 1] - b_.row_start[r];
            // Late tiles see the longest history: start with them.
            for (int32_t first = int32_t((count - 1) / tile * tile); first >= 0; first -= int32_t(tile)) {
                const int32_t size = std::min<int32_t>(int32_t(tile), count - first);
                most_queries_ = std::max<int64_t>(most_queries_, size * group_);
                for (int32_t h = 0; h < m_.kv_heads; h++) tasks_.push_back({int32_t(r), h, first, size});
            }
        }
    }

    const Model& m_;
    const Batch& b_;
    const Buffers& buf_;
    float* logits_;
    int64_t q_size_, kv_size_, ld_qkv_, ld_act_, group_, most_queries_ = 1;
    std::vector<Task> tasks_;
};

template <class W>
void run_kv(Pass& pass, const Model& model) {
    model.half_kv ? pass.run<W, Half>() : pass.run<W, float>();
}

}  // namespace hortator

using namespace hortator;

extern "C" {

// Logits [batch.logits, vocab rounded up to 16] of `batch`; writes the KV of its tokens.
void hortator_forward(const Model* model, const Batch* batch, const Buffers* buffers, float* logits) {
    Pass pass(*model, *batch, *buffers, logits);
    model->half_weights ? run_kv<Half>(pass, *model) : run_kv<float>(pass, *model);
}

// Panels of weights [n, k]; `panels` holds n rounded up to 16, times k, elements.
void hortator_pack(const float* weights, int64_t n, int64_t k, int64_t half, void* panels) {
#pragma omp parallel
    half ? pack(weights, n, k, static_cast<Half*>(panels)) : pack(weights, n, k, static_cast<float*>(panels));
}

// c [m, n rounded up to 16] = or += a [m, k] · wᵀ: one matrix product by itself, for tests and measurements.
void hortator_multiply(const Matrix* w, int64_t half, int64_t m, const float* a, float* c, int64_t add,
                       int64_t threads) {
    const int64_t ldc = panels_of(w->n) * kPanel;
    const Into into = add ? Into::kAdd : Into::kStore;
#pragma omp parallel num_threads(int(threads))
    half ? multiply<Half>(*w, m, a, w->k, c, ldc, into) : multiply<float>(*w, m, a, w->k, c, ldc, into);
}

// finite[r], best[r]: whether all of row r of values [rows, ld] is finite, and the first index of its maximum.
void hortator_scan(const float* values, int64_t rows, int64_t size, int64_t ld, uint8_t* finite, int64_t* best,
                   int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t r = 0; r < rows; r++) {
        const float* row = values + r * ld;
        Vec most = splat(-std::numeric_limits<float>::infinity()), zero = _mm256_setzero_ps();
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
            const Vec v = load(row + i);
            most = _mm256_max_ps(most, v);
            zero = fma(v, _mm256_setzero_ps(), zero);  // NaN as soon as one value is not finite
        }
        float top = largest(most), rest = sum(zero);
        for (; i < size; i++) {
            top = std::max(top, row[i]);
            rest += row[i] * 0.0f;
        }
        finite[r] = rest == 0.0f;
        best[r] = finite[r] ? std::find(row, row + size, top) - row : 0;
    }
}

}  // extern "C"
