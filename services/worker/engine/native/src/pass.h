// One forward pass of a ragged batch, by one rank. `../abi.py` mirrors the structs.
//
// The whole pass is one run of the team; every loop inside is shared by its members and ends with a barrier.
//
// A rank of a group computes its heads and channels. What a row-parallel product (out, down) yields is then a part
// of a sum over all ranks: it is written where the group's messages are, sent, and added to the residual stream when
// it lands. The tokens of a step are cut into chunks, and each stage (half a layer) takes one chunk after the other:
// while a chunk's message travels, the next chunks are computed, and its own next stage begins as soon as it is
// there. One chunk is right where messages cost less than reading the weights once more, as in decoding.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "../../../collective/src/exchange.h"
#include "attention_plan.h"
#include "elementwise.h"
#include "gemm.h"
#include "team.h"

namespace hortator {

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm, k_norm: null if the model has none
    Matrix qkv, out, gate_up, down;                          // gate_up: panels of gate and up in turn
};

// A model, or a rank's part of one: numbers of heads, channels and vocabulary rows are those held here.
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
    const int32_t* groups;     // [kv_heads] query heads of each
    int64_t first_id;          // whose row is the first of embed
    const Exchange* exchange;  // null: no group, the model is whole
};

// Layers [first_layer, stop_layer) of a pass are computed; all but those of measurements are whole.
struct Batch {
    int64_t tokens, rows, table_width, logits, chunks, first_layer, stop_layer;
    const int32_t *ids, *positions, *row_start, *table, *write_block, *write_offset, *logit_tokens;
    const int32_t* chunk_start;  // [chunks + 1] first token of each chunk, then `tokens`
    // ids null: buffers.x [tokens, hidden] is what enters the first layer.
};

// Activations, [tokens, …] each; act's rows are rounded up to a panel.
struct Buffers {
    float *x, *normed, *qkv, *attended, *act;
    Codes codes;  // of the widest activations, if weights are kInt8Dynamic
};

// Where the time of a pass goes: seconds per kind of work, added up over passes. `PHASES` in ../decoder.py names
// them. kExposed is the time in which nothing could be computed for want of a message.
enum Phase { kEmbed, kNorm, kQkv, kPlace, kAttention, kOut, kGateUp, kDown, kHead, kExposed, kPhases };

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
          group_(model.exchange) {
        q_size_ = m_.heads * m_.head_dim;
        kv_size_ = m_.kv_heads * m_.head_dim;
        ld_qkv_ = q_size_ + 2 * kv_size_;
        ld_act_ = panels_of(m_.intermediate) * kPanel;
        const Sequences rows{b_.rows, b_.table_width, b_.row_start, b_.positions, b_.table};
        const int32_t *logit = b_.logit_tokens, *const end = logit + b_.logits;
        int64_t state_floats = 0;
        chunks_.reserve(b_.chunks);
        for (int64_t c = 0; c < b_.chunks; c++) {
            const int64_t first = b_.chunk_start[c], stop = b_.chunk_start[c + 1];
            const int32_t* const after = std::lower_bound(logit, end, stop);
            const Rows all{first, stop - first}, wanted{logit - b_.logit_tokens, after - logit};
            chunks_.push_back({all, wanted, AttentionPlan(team_, rows, {m_.kv_heads, m_.groups}, m_.head_dim, first,
                                                          stop, {wanted.count, logit})});
            state_floats = std::max(state_floats, chunks_.back().attention.state_floats());
            logit = after;
        }
        float* const states = team_.shared(state_floats);
        for (Chunk& chunk : chunks_) chunk.attention.use_states(states);
    }

    // False: the group is lost, and the logits mean nothing.
    template <class T>
    bool run() {
        team_.run([this](int member) { pass<T>(member); });
        return !lost_.load();
    }

  private:
    // Rows of x: at first one for each token, behind the last layer's attention one for each logit token.
    struct Rows {
        int64_t first, count;
    };

    struct Chunk {
        Rows all, wanted;
        AttentionPlan attention;
    };

    template <class T>
    void pass(int member) {
        if (b_.ids) {
            for (const Chunk& chunk : chunks_) embed(chunk.all, member);
        }
        for (int64_t i = b_.first_layer; i < b_.stop_layer; i++) {
            const Layer& layer = m_.layer[i];
            const bool last = i + 1 == m_.layers, sent = i > b_.first_layer || b_.ids;
            for (Chunk& chunk : chunks_) {
                if (sent && !arrive(chunk.all, layer.input_norm, member)) return;
                if (!sent) norm_all(chunk.all, layer.input_norm, member);
                attend<T>(i, chunk, last, member);
            }
            for (const Chunk& chunk : chunks_) {
                const Rows& rows = last ? chunk.wanted : chunk.all;
                if (!arrive(rows, layer.post_norm, member)) return;
                feed_forward(layer, rows, member);
            }
        }
        const bool whole = b_.stop_layer == m_.layers;
        for (const Chunk& chunk : chunks_) {
            if (!arrive(whole ? chunk.wanted : chunk.all, m_.norm, member)) return;
        }
        if (!whole) return;
        multiply(team_, m_.head, b_.logits, buf_.normed, m_.hidden, logits_, panels_of(m_.head.n) * kPanel,
                    Into::kStore, buf_.codes);
        tick(member, kHead);
    }

    // Of a group, each id's row lies on one rank; the others add nothing to it.
    void embed(const Rows& rows, int member) {
        if (group_) open_part(rows.count * m_.hidden);
        team_.each(rows.count, kRowGrain, [&](int64_t r) {
            const int64_t t = rows.first + r, id = b_.ids[t] - m_.first_id;
            float* const x = buf_.x + t * m_.hidden;
            if (!group_) return unpack_row(m_.embed, id, m_.hidden, x);
            float* const part = part_.load(std::memory_order_relaxed) + r * m_.hidden;
            std::fill_n(x, m_.hidden, 0.0f);
            if (0 <= id && id < m_.embed.n) {
                unpack_row(m_.embed, id, m_.hidden, part);
            } else {
                std::fill_n(part, m_.hidden, 0.0f);
            }
        });
        if (group_) send_part();
        tick(member, kEmbed);
    }

    // The first half of a layer, up to what heads attended to; of its last layer a pass needs that of logit
    // tokens alone.
    template <class T>
    void attend(int64_t index, Chunk& chunk, bool last, int member) {
        const Layer& layer = m_.layer[index];
        const int64_t dim = m_.head_dim, first = chunk.all.first;
        const int64_t per_layer = 2 * m_.kv_heads * m_.block_tokens * dim;
        const Pages pages{m_.kv, m_.layers * per_layer, index * per_layer, m_.kv_heads, m_.block_tokens, dim};
        multiply(team_, layer.qkv, chunk.all.count, buf_.normed + first * m_.hidden, m_.hidden,
                 buf_.qkv + first * ld_qkv_, ld_qkv_, Into::kStore, buf_.codes);
        tick(member, kQkv);
        team_.each(chunk.all.count, kRowGrain, [&](int64_t r) { place<T>(layer, pages, first + r); });
        tick(member, kPlace);
        const Heads heads{buf_.qkv, ld_qkv_, buf_.attended, q_size_};
        last ? chunk.attention.run_chosen<T>(member, pages, heads) : chunk.attention.run<T>(member, pages, heads);
        tick(member, kAttention);
        if (last) keep_wanted(chunk.wanted);
        const Rows& rows = last ? chunk.wanted : chunk.all;
        add_to_x(layer.out, rows, buf_.attended + rows.first * q_size_, q_size_);
        tick(member, kOut);
    }

    // Bring the rows of logit tokens to the front; each moves towards it, if at all, onto rows of chunks that are
    // done with theirs.
    void keep_wanted(const Rows& wanted) {
        if (b_.logits == b_.tokens) return;
        team_.each(1, [&](int64_t) {
            for (int64_t i = wanted.first; i < wanted.first + wanted.count; i++) {
                const int64_t from = b_.logit_tokens[i];
                std::copy_n(buf_.x + from * m_.hidden, m_.hidden, buf_.x + i * m_.hidden);
                std::copy_n(buf_.attended + from * q_size_, q_size_, buf_.attended + i * q_size_);
            }
        });
    }

    void feed_forward(const Layer& layer, const Rows& rows, int member) {
        float* const act = buf_.act + rows.first * ld_act_;
        multiply_silu(team_, layer.gate_up, rows.count, buf_.normed + rows.first * m_.hidden, m_.hidden, act, ld_act_,
                      buf_.codes);
        tick(member, kGateUp);
        add_to_x(layer.down, rows, act, ld_act_);
        tick(member, kDown);
    }

    // x of these rows += a · wᵀ: of a group the rank's part of it, which arrives later.
    void add_to_x(const Matrix& w, const Rows& rows, const float* a, int64_t lda) {
        if (!rows.count) return;
        if (group_) {
            open_part(rows.count * m_.hidden);
            multiply(team_, w, rows.count, a, lda, part_.load(std::memory_order_relaxed), m_.hidden, Into::kStore,
                     buf_.codes);
            send_part();
        } else {
            multiply(team_, w, rows.count, a, lda, buf_.x + rows.first * m_.hidden, m_.hidden, Into::kAdd, buf_.codes);
        }
    }

    void open_part(int64_t floats) {
        team_.each(1, [&](int64_t) {
            part_.store(group_->room(group_->self, floats, int64_t(Kind::kSum)), std::memory_order_relaxed);
        });
    }
    void send_part() {
        team_.each(1, [&](int64_t) { group_->begin(group_->self); });
    }

    // normed = these rows of x, normalised, once what was to be added to them is there. False: the group is lost.
    bool arrive(const Rows& rows, const float* weight, int member) {
        if (!rows.count) return true;
        if (group_) {
            team_.each(1, [&](int64_t) {
                group_->land(group_->self, &landed_);
                if (!landed_.parts) lost_.store(true, std::memory_order_relaxed);
            });
            tick(member, kExposed);
            if (lost_.load(std::memory_order_relaxed)) return false;
        }
        norm_all(rows, weight, member, group_);
        if (group_) team_.each(1, [&](int64_t) { group_->release(group_->self); });
        return true;
    }

    void norm_all(const Rows& rows, const float* weight, int member, bool landed = false) {
        team_.each(rows.count, kRowGrain, [&](int64_t r) {
            float* const x = buf_.x + (rows.first + r) * m_.hidden;
            if (landed) add_parts(r * m_.hidden, x);
            rms_norm(x, weight, m_.hidden, m_.eps, buf_.normed + (rows.first + r) * m_.hidden);
        });
        tick(member, kNorm);
    }

    // The sum first, then the residual: the sum's bits are those of any other way to add the parts in their order.
    void add_parts(int64_t at, float* x) {
        for (int64_t i = 0; i < m_.hidden; i += kLanes) {
            Vec total = load(landed_.part[0] + at + i);
            for (int64_t p = 1; p < landed_.parts; p++) total = _mm256_add_ps(total, load(landed_.part[p] + at + i));
            store(x + i, _mm256_add_ps(load(x + i), total));
        }
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
    const Exchange* const group_;
    std::vector<Chunk> chunks_;
    Landed landed_{};                    // the message at hand
    std::atomic<float*> part_{nullptr};  // where the part at hand is written
    std::atomic<bool> lost_{false};
    int64_t q_size_, kv_size_, ld_qkv_, ld_act_;
};

}  // namespace hortator
