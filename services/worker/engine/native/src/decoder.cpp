// What the kernels offer to Python. `../abi.py` mirrors the structs.
#include <algorithm>
#include <exception>
#include <limits>

#include "attention_plan.h"
#include "candidates.h"
#include "draw.h"
#include "pass.h"
#include "team.h"

using namespace hortator;

extern "C" {

// Logits [batch.logits, rows of head rounded up to 16] of `batch`; writes the KV of its tokens and adds to spent
// [kPhases]. 1: the group is lost; else 0.
int64_t hortator_forward(const Model* model, const Batch* batch, const Buffers* buffers, float* logits, double* spent) {
    Pass pass(*model, *batch, *buffers, logits, spent);
    return !(model->half_kv ? pass.run<Half>() : pass.run<float>());
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
    const int32_t* groups;  // [kv_heads] query heads of each
};

// Attention of a ragged batch by itself, for tests and measurements.
void hortator_attend(Team* team, const AttentionCall* c) {
    const int64_t per_layer = 2 * c->kv_heads * c->block_tokens * c->head_dim, ld = c->heads * c->head_dim;
    const Pages pages{c->kv, c->layers * per_layer, c->layer * per_layer, c->kv_heads, c->block_tokens, c->head_dim};
    const Sequences rows{c->rows, c->table_width, c->row_start, c->positions, c->table};
    AttentionPlan plan(*team, rows, {c->kv_heads, c->groups}, c->head_dim, 0, c->row_start[c->rows]);
    plan.use_states(team->shared(plan.state_floats()));
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
