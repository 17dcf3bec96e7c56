// The forward pass of a ragged batch, one call per step. `../abi.py` mirrors the structs.
//
// The whole pass is one run of the team; every loop inside is shared by its members and ends with a barrier.
#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <vector>

#include "attention_plan.h"
#include "draw.h"
#include "elementwise.h"
#include "gemm.h"
#include "team.h"

namespace hortator {

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm, k_norm: null if the model has none
    Matrix qkv, out, gate_up, down;                          // gate_up: panels of gate and up in turn
};

struct Model {
    int64_t hidden, intermediate, heads, kv_heads, head_dim, layers, block_tokens;
    int64_t half_kv;
    float eps;
    const float *cos, *sin;  // [max_len, head_dim / 2]
    const Layer* layer;
    Matrix embed, head;
    const float* norm;
    void* kv;
    Team* team;
};

struct Batch {
    int64_t tokens, rows, table_width, logits;
    const int32_t *ids, *positions, *row_start, *table, *write_block, *write_offset, *logit_tokens;
};

// Activations, [tokens, …] each; act's rows are rounded up to a panel.
struct Buffers {
    float *x, *normed, *qkv, *attended, *act;
    Codes codes;  // of the widest activations, if weights are kInt8Dynamic
};

// Where the time of a pass goes: seconds per kind of work, added up over passes. `PHASES` in ../decoder.py names them.
enum Phase { kEmbed, kNorm, kQkv, kPlace, kAttention, kOut, kGateUp, kDown, kHead, kPhases };

class Clock {
  public:
    explicit Clock(double* spent) : spent_(spent), last_(std::chrono::steady_clock::now()) {}
    // Everything since the last call was `phase`. Called by member 0, after a barrier.
    void tick(Phase phase) {
        const auto now = std::chrono::steady_clock::now();
        spent_[phase] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

  private:
    double* spent_;
    std::chrono::steady_clock::time_point last_;
};

constexpr int64_t kRowGrain = 4;  // tokens handed out together where each is little work

class Pass {
  public:
    Pass(const Model& model, const Batch& batch, const Buffers& buffers, float* logits, double* spent)
        : m_(model), b_(batch), buf_(buffers), logits_(logits), clock_(spent), team_(*model.team),
          attention_(team_, {batch.rows, batch.table_width, batch.row_start, batch.positions, batch.table}, model.heads,
                     model.kv_heads, model.head_dim, {batch.logits, batch.logit_tokens}) {
        q_size_ = m_.heads * m_.head_dim;
        kv_size_ = m_.kv_heads * m_.head_dim;
        ld_qkv_ = q_size_ + 2 * kv_size_;
        ld_act_ = panels_of(m_.intermediate) * kPanel;
    }

    template <class T>
    void run() {
        team_.run([this](int member) { pass<T>(member); });
    }

  private:
    template <class T>
    void pass(int member) {
        team_.each(b_.tokens, [&](int64_t t) { unpack_row(m_.embed, b_.ids[t], m_.hidden, buf_.x + t * m_.hidden); });
        tick(member, kEmbed);
        for (int64_t i = 0; i < m_.layers; i++) {
            const bool last = i + 1 == m_.layers;
            attend<T>(i, last, member);
            if (last) keep_logit_tokens();
            finish_layer(m_.layer[i], last ? b_.logits : b_.tokens, member);
        }
        norm_all(m_.norm, b_.logits, member);
        multiply(team_, m_.head, b_.logits, buf_.normed, m_.hidden, logits_, panels_of(m_.head.n) * kPanel,
                    Into::kStore, buf_.codes);
        tick(member, kHead);
    }

    // The first half of a layer, up to what heads attended to; of its last layer a pass needs that of logit
    // tokens alone.
    template <class T>
    void attend(int64_t index, bool last, int member) {
        const Layer& layer = m_.layer[index];
        const int64_t dim = m_.head_dim;
        const int64_t per_layer = 2 * m_.kv_heads * m_.block_tokens * dim;
        const Pages pages{m_.kv, m_.layers * per_layer, index * per_layer, m_.kv_heads, m_.block_tokens, dim};
        norm_all(layer.input_norm, b_.tokens, member);
        multiply(team_, layer.qkv, b_.tokens, buf_.normed, m_.hidden, buf_.qkv, ld_qkv_, Into::kStore, buf_.codes);
        tick(member, kQkv);
        team_.each(b_.tokens, kRowGrain, [&](int64_t t) { place<T>(layer, pages, t); });
        tick(member, kPlace);
        const Heads heads{buf_.qkv, ld_qkv_, buf_.attended, q_size_};
        last ? attention_.run_chosen<T>(member, pages, heads) : attention_.run<T>(member, pages, heads);
        tick(member, kAttention);
    }

    // Bring the rows of logit tokens to the front; each moves towards it, if at all.
    void keep_logit_tokens() {
        if (b_.logits == b_.tokens) return;
        team_.each(1, [&](int64_t) {
            for (int64_t i = 0; i < b_.logits; i++) {
                const int64_t from = b_.logit_tokens[i];
                std::copy_n(buf_.x + from * m_.hidden, m_.hidden, buf_.x + i * m_.hidden);
                std::copy_n(buf_.attended + from * q_size_, q_size_, buf_.attended + i * q_size_);
            }
        });
    }

    void finish_layer(const Layer& layer, int64_t tokens, int member) {
        multiply(team_, layer.out, tokens, buf_.attended, q_size_, buf_.x, m_.hidden, Into::kAdd, buf_.codes);
        tick(member, kOut);
        norm_all(layer.post_norm, tokens, member);
        multiply_silu(team_, layer.gate_up, tokens, buf_.normed, m_.hidden, buf_.act, ld_act_, buf_.codes);
        tick(member, kGateUp);
        multiply(team_, layer.down, tokens, buf_.act, ld_act_, buf_.x, m_.hidden, Into::kAdd, buf_.codes);
        tick(member, kDown);
    }

    void norm_all(const float* weight, int64_t tokens, int member) {
        team_.each(tokens, kRowGrain, [&](int64_t t) {
            rms_norm(buf_.x + t * m_.hidden, weight, m_.hidden, m_.eps, buf_.normed + t * m_.hidden);
        });
        tick(member, kNorm);
    }

    void tick(int member, Phase phase) {
        if (member == 0) clock_.tick(phase);
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

    const Model& m_;
    const Batch& b_;
    const Buffers& buf_;
    float* logits_;
    Clock clock_;
    Team& team_;
    AttentionPlan attention_;
    int64_t q_size_, kv_size_, ld_qkv_, ld_act_;
};

}  // namespace hortator

using namespace hortator;

extern "C" {

// Logits [batch.logits, vocab rounded up to 16] of `batch`; writes the KV of its tokens and adds to spent [kPhases].
void hortator_forward(const Model* model, const Batch* batch, const Buffers* buffers, float* logits, double* spent) {
    Pass pass(*model, *batch, *buffers, logits, spent);
    model->half_kv ? pass.run<Half>() : pass.run<float>();
}

// A team of `threads`, the caller included; it lives until hortator_dismiss. Null if they cannot be had.
Team* hortator_muster(int64_t threads) {
    try {
        return new Team(int(threads));
    } catch (const std::exception&) {
        return nullptr;
    }
}
void hortator_dismiss(Team* team) { delete team; }

// Fills w.panels (n rounded up to 16, times w.k, elements) and, of int8 formats, w.scale with weights [n, k];
// inputs from k to w.k are zero.
void hortator_pack(Team* team, const float* weights, int64_t k, const Matrix* w) {
    team->run([&](int) { pack(*team, weights, k, *w); });
}

// c [m, n rounded up to 16] = or += a [m, k] · wᵀ: one matrix product by itself, for tests and measurements.
void hortator_multiply(Team* team, const Matrix* w, int64_t m, const float* a, int64_t k, float* c, int64_t add,
                       const Codes* codes) {
    const int64_t ldc = panels_of(w->n) * kPanel;
    const Into into = add ? Into::kAdd : Into::kStore;
    team->run([&](int) { multiply(*team, *w, m, a, k, c, ldc, into, *codes); });
}

// What `hortator_attend` works on: layer `layer` of paged KV [block, layers, 2, kv_heads, block_tokens, head_dim].
struct AttentionCall {
    void* kv;
    int64_t half_kv, layer, layers, heads, kv_heads, head_dim, block_tokens, rows, table_width;
    const int32_t *row_start, *positions, *table;
    const float* q;  // [tokens, heads, head_dim], as out
    float* out;
};

// Attention of a ragged batch by itself, for tests and measurements.
void hortator_attend(Team* team, const AttentionCall* c) {
    const int64_t per_layer = 2 * c->kv_heads * c->block_tokens * c->head_dim, ld = c->heads * c->head_dim;
    const Pages pages{c->kv, c->layers * per_layer, c->layer * per_layer, c->kv_heads, c->block_tokens, c->head_dim};
    const Sequences rows{c->rows, c->table_width, c->row_start, c->positions, c->table};
    AttentionPlan plan(*team, rows, c->heads, c->kv_heads, c->head_dim);
    const Heads heads{c->q, ld, c->out, ld};
    team->run([&](int member) {
        c->half_kv ? plan.run<Half>(member, pages, heads) : plan.run<float>(member, pages, heads);
    });
}

// finite[r], best[r]: whether all of row r of values [rows, ld] is finite, and the first index of its maximum.
void hortator_scan(Team* team, const float* values, int64_t rows, int64_t size, int64_t ld, uint8_t* finite,
                   int64_t* best) {
    auto scan_row = [&](int64_t r) {
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
    };
    team->run([&](int) { team->each(rows, scan_row); });
}

// tokens[i] of draws[i] from values [rows, ld], of which `size` are logits.
void hortator_draw(Team* team, const float* values, int64_t size, int64_t ld, const Draw* draws, int64_t count,
                   int64_t* tokens) {
    team->run([&](int member) {
        Drawer drawer(size, team->scratch(member, Drawer::floats(size)));
        team->each(count, [&](int64_t i) { tokens[i] = drawer.draw(values + draws[i].row * ld, draws[i]); });
    });
}

}  // extern "C"
