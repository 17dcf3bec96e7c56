// Grouped-query attention over paged KV, read in place: decode tokens and prefill chunks by the same code.
//
// A sequence's KV is walked in units of 16 tokens from position 0, with a running maximum and sum per query;
// every 512 tokens the state is folded into the total. A query's result depends on its own history only.
#pragma once
#include <cmath>
#include <limits>

#include "gemm.h"

namespace hortator {

constexpr int kUnit = 16;           // KV tokens per round; one panel of scores
constexpr int kSegment = 512;       // KV tokens per fold
constexpr int kQueryTokens = 16;    // chunk tokens per task
constexpr int kMaxQueries = 256;    // kQueryTokens × query heads per KV head, at most

// Paged KV [block, layer, 2, kv_head, token, head_dim] of one layer.
struct Pages {
    void* data;
    int64_t block_step;  // elements from block to block
    int64_t layer_at;    // element where the layer begins in a block
    int64_t kv_heads, block_tokens, head_dim;

    template <class T>
    T* at(int64_t block, int which, int64_t head, int64_t token) const {
        return static_cast<T*>(data) + block * block_step + layer_at +
               ((which * kv_heads + head) * block_tokens + token) * head_dim;
    }
};

// State of the queries of one task.
struct Running {
    float* out;   // [queries, dim]
    float* most;  // [queries] largest score so far
    float* mass;  // [queries] sum of exp(score - most)

    void clear(int64_t queries, int64_t dim) const {
        std::fill_n(out, queries * dim, 0.0f);
        std::fill_n(most, queries, -std::numeric_limits<float>::infinity());
        std::fill_n(mass, queries, 0.0f);
    }
};

inline void scale(float* values, int64_t count, float by) {
    const Vec factor = splat(by);
    for (int64_t i = 0; i < count; i += kLanes) store(values + i, _mm256_mul_ps(load(values + i), factor));
}

// total += part, both relative to their own maximum.
inline void fold(const Running& total, const Running& part, int64_t queries, int64_t dim) {
    for (int64_t q = 0; q < queries; q++) {
        if (!(part.mass[q] > 0.0f) && part.mass[q] == part.mass[q]) continue;  // nothing visible; NaN goes on
        const float most = std::max(total.most[q], part.most[q]);
        const float keep = std::exp(total.most[q] - most), add = std::exp(part.most[q] - most);
        total.mass[q] = total.mass[q] * keep + part.mass[q] * add;
        for (int64_t i = 0; i < dim; i += kLanes) {
            const Vec kept = _mm256_mul_ps(load(total.out + q * dim + i), splat(keep));
            store(total.out + q * dim + i, fma(load(part.out + q * dim + i), splat(add), kept));
        }
        total.most[q] = most;
    }
}

// The 16 keys of a unit in place, one pointer each. Behind `valid` the last one is repeated; its scores are masked.
template <class T>
inline void find_keys(const Pages& pages, const int32_t* table, int64_t head, int64_t start, int64_t valid,
                      const T* keys[kUnit]) {
    for (int64_t t = 0; t < kUnit; t++) {
        const int64_t token = start + std::min(t, valid - 1);
        keys[t] = pages.at<T>(table[token / pages.block_tokens], 0, head, token % pages.block_tokens);
    }
}

// The same keys as float32, for many queries: expanded once into `scratch` [16, dim] if they are 16 bit.
inline void expand_keys(const float* const from[kUnit], int64_t, float*, const float* to[kUnit]) {
    std::copy_n(from, kUnit, to);
}
inline void expand_keys(const Half* const from[kUnit], int64_t dim, float* scratch, const float* to[kUnit]) {
    for (int64_t t = 0; t < kUnit; t++) {
        to[t] = scratch + t * dim;
        for (int64_t d = 0; d < dim; d += kLanes) store(scratch + t * dim + d, load(from[t] + d));
    }
}

// Part `part` of `parts` of the memory a later unit will read. Asked for in small portions between arithmetic:
// all at once they would wait for each other, and a page is too short for the hardware's own prefetcher.
struct Ahead {
    const char* first = nullptr;
    int64_t lines = 0;

    void ask(int64_t part, int64_t parts) const {
        for (int64_t i = lines * part / parts; i < lines * (part + 1) / parts; i++) {
            _mm_prefetch(first + i * 64, _MM_HINT_T0);
        }
    }
};

// Keys (0) or values (1) of the run of tokens from `start` that lie together in one block.
template <class T>
inline Ahead run_ahead(const Pages& pages, const int32_t* table, int which, int64_t head, int64_t start,
                       int64_t length) {
    if (start >= length) return {};
    const int64_t offset = start % pages.block_tokens;
    const int64_t tokens = std::min(std::min<int64_t>(kUnit, pages.block_tokens - offset), length - start);
    const T* first = pages.at<T>(table[start / pages.block_tokens], which, head, offset);
    return {reinterpret_cast<const char*>(first), int64_t(tokens * pages.head_dim * sizeof(T) / 64)};
}

// Four dot products whose lanes are still apart → their sums, lanes paired in a fixed order.
inline __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const Vec cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const Vec all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// scores [R, 16] = q [R, dim] · keys.
template <int R, class T>
inline void score(const float* q, const T* const keys[kUnit], int64_t dim, float* scores, const Ahead& ahead) {
    for (int64_t t = 0; t < kUnit; t += 4) {
        ahead.ask(t / 4, kUnit / 4);
        Vec acc[R][4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[r][j] = _mm256_setzero_ps();
        }
        for (int64_t d = 0; d < dim; d += kLanes) {
            Vec x[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) x[r] = load(q + r * dim + d);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const Vec key = load(keys[t + j] + d);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) acc[r][j] = fma(x[r], key, acc[r][j]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            _mm_storeu_ps(scores + r * kUnit + t, sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
        }
    }
}

constexpr int kScoreRows = 3;  // 3 × 4 accumulators, and the queries they belong to

template <class T>
inline void score_few(int64_t queries, const float* q, const T* const keys[kUnit], int64_t dim, float* scores,
                      const Ahead& ahead) {
    switch (queries) {
        case 1: return score<1>(q, keys, dim, scores, ahead);
        case 2: return score<2>(q, keys, dim, scores, ahead);
        default: return score<3>(q, keys, dim, scores, ahead);
    }
}

template <class T>
inline void score_all(int64_t queries, const float* q, const T* const keys[kUnit], int64_t dim, float* scratch,
                      float* scores, const Ahead& ahead) {
    if (queries <= kScoreRows) return score_few(queries, q, keys, dim, scores, ahead);
    const float* expanded[kUnit];
    expand_keys(keys, dim, scratch, expanded);
    for (int64_t i = 0; i < queries; i += kScoreRows) {
        const int64_t rows = std::min<int64_t>(kScoreRows, queries - i);
        score_few(rows, q + i * dim, expanded, dim, scores + i * kUnit, i ? Ahead{} : ahead);
    }
}

// Turn scores [queries, 16] into weights, and bring `state` to the new maxima. Query q belongs to token
// q / group of the chunk and sees positions up to first_position + q / group.
inline void weigh(float* scores, const Running& state, int64_t queries, int64_t group, int64_t dim, int64_t start,
                  int64_t first_position) {
    const float nothing = -std::numeric_limits<float>::infinity();
    for (int64_t q = 0; q < queries; q++) {
        float* row = scores + q * kUnit;
        const int64_t visible = first_position + q / group + 1 - start;
        if (visible <= 0) {
            std::fill_n(row, kUnit, 0.0f);
            continue;
        }
        for (int64_t t = visible; t < kUnit; t++) row[t] = nothing;
        const Vec left = load(row), right = load(row + kLanes);
        const float most = std::max(state.most[q], largest(_mm256_max_ps(left, right)));
        const Vec base = splat(most);
        const Vec a = exp(_mm256_sub_ps(left, base)), b = exp(_mm256_sub_ps(right, base));
        store(row, a);
        store(row + kLanes, b);
        if (most > state.most[q]) {
            const float keep = _mm256_cvtss_f32(exp(splat(state.most[q] - most)));
            state.mass[q] *= keep;
            scale(state.out + q * dim, dim, keep);
            state.most[q] = most;
        }
        state.mass[q] += sum(_mm256_add_ps(a, b));
    }
}

// out [queries, dim] += weights [queries, 16] · values of tokens [start, start + valid).
template <class T>
inline void gather_values(const Pages& pages, const int32_t* table, int64_t head, int64_t start, int64_t valid,
                          const float* weights, int64_t queries, float* out, const Ahead& ahead) {
    const int64_t run = std::min<int64_t>(kUnit, pages.block_tokens), dim = pages.head_dim;
    for (int64_t t = 0; t < valid; t += run) {
        const int64_t token = start + t, length = std::min(run, valid - t);
        const T* values = pages.at<T>(table[token / pages.block_tokens], 1, head, token % pages.block_tokens);
        int64_t d = 0;
        for (; queries <= 3 && d + 2 * kPanel <= dim; d += 2 * kPanel) {
            if (t == 0) ahead.ask(d / (2 * kPanel), dim / (2 * kPanel));
            tile_rows<2>(int(queries), length, weights + t, kUnit, values + d, dim, kPanel, out + d, dim, Into::kAdd,
                         nullptr);
        }
        for (; d < dim; d += kPanel) {
            strip(queries, length, weights + t, kUnit, values + d, dim, out + d, dim, Into::kAdd, nullptr);
        }
    }
}

// Scratch of one thread for tasks of up to `queries` queries.
struct AttentionScratch {
    float *scaled, *scores, *keys;
    Running total, part;
    static int64_t floats(int64_t queries, int64_t dim) {
        return queries * (3 * dim + kUnit + 4) + dim * kUnit + 64;
    }
    AttentionScratch(float* memory, int64_t queries, int64_t dim) {
        auto take = [&](int64_t count) { return (memory += count) - count; };
        keys = take(dim * kUnit);
        scores = take(queries * kUnit);
        scaled = take(queries * dim);
        total = {take(queries * dim), take(queries), take(queries)};
        part = {take(queries * dim), take(queries), take(queries)};
    }
};

// Attention of `tokens` consecutive tokens at positions from `first_position`, the query heads of one KV head.
// q and out [tokens, ld] point at the first of these heads.
template <class T>
void attend(const Pages& pages, const int32_t* table, int64_t head, int64_t group, int64_t first_position,
            int64_t tokens, const float* q, int64_t ldq, float* out, int64_t ldo, const AttentionScratch& s) {
    const int64_t dim = pages.head_dim, queries = tokens * group, length = first_position + tokens;
    const Vec factor = splat(1.0f / std::sqrt(float(dim)));
    for (int64_t i = 0; i < queries; i++) {
        const float* from = q + i / group * ldq + i % group * dim;
        for (int64_t d = 0; d < dim; d += kLanes) store(s.scaled + i * dim + d, _mm256_mul_ps(load(from + d), factor));
    }
    s.total.clear(queries, dim);
    for (int64_t segment = 0; segment < length; segment += kSegment) {
        s.part.clear(queries, dim);
        for (int64_t start = segment; start < std::min<int64_t>(segment + kSegment, length); start += kUnit) {
            const int64_t valid = std::min<int64_t>(kUnit, length - start);
            const T* keys[kUnit];
            find_keys<T>(pages, table, head, start, valid, keys);
            score_all(queries, s.scaled, keys, dim, s.keys, s.scores,
                      run_ahead<T>(pages, table, 0, head, start + kUnit, length));
            weigh(s.scores, s.part, queries, group, dim, start, first_position);
            gather_values<T>(pages, table, head, start, valid, s.scores, queries, s.part.out,
                             run_ahead<T>(pages, table, 1, head, start + kUnit, length));
        }
        fold(s.total, s.part, queries, dim);
    }
    for (int64_t i = 0; i < queries; i++) {
        const Vec share = splat(1.0f / s.total.mass[i]);
        float* to = out + i / group * ldo + i % group * dim;
        for (int64_t d = 0; d < dim; d += kLanes) store(to + d, _mm256_mul_ps(load(s.total.out + i * dim + d), share));
    }
}

}  // namespace hortator
