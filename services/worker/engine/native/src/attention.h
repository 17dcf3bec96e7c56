// Grouped-query attention over paged KV, read in place: decode tokens and prefill chunks by the same code.
//
// A sequence's KV is cut into segments of 256 tokens from position 0; within one a running maximum and sum per
// query, every 64 tokens. Segments are independent of each other and folded in ascending order, so that a query's
// result depends on its own history only: not on the batch, the chunk, or who computed which segment.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace hortator {

constexpr int kRun = 16;       // KV tokens read together: they lie in one block if blocks have so many
constexpr int kUnit = 64;      // KV tokens per round of maximum, weights and sum
constexpr int kSegment = 256;  // KV tokens per fold
constexpr int kAhead = kRun;   // how far ahead memory is asked for
constexpr int kFewRows = 3;    // queries of which a register tile is 3 × 4
constexpr int kAskPerTile = 2; // lines asked for beside a register tile
constexpr int kRows = 6;       // queries per register tile: 6 × 2 sums leave room for keys or values and one query

// Paged KV [block, layer, 2, kv_head, token, head_dim] of one layer.
struct Pages {
    void* data;
    int64_t block_step;  // elements from block to block
    int64_t layer_at;    // element where the layer begins in a block
    int64_t kv_heads, block_tokens, head_dim;
    int token_bits = std::countr_zero(uint64_t(block_tokens));  // blocks have a power of two of tokens

    template <class T>
    T* at(int64_t block, int which, int64_t head, int64_t offset) const {
        return static_cast<T*>(data) + block * block_step + layer_at +
               ((which * kv_heads + head) * block_tokens + offset) * head_dim;
    }

    // Keys (0) or values (1) of the sequence's token `token` and those behind it in its block.
    template <class T>
    const T* find(const int32_t* table, int which, int64_t head, int64_t token) const {
        return at<T>(table[token >> token_bits], which, head, token & (block_tokens - 1));
    }
};

// The queries of consecutive tokens of one sequence that share a KV head: query i is head i % group of token i / group.
struct Tile {
    const int32_t* table;
    int64_t head, group, first_position, tokens;

    int64_t queries() const { return tokens * group; }
    int64_t length() const { return first_position + tokens; }  // KV tokens that the last token sees
    int64_t segments() const { return (length() + kSegment - 1) / kSegment; }
};

// State of the queries of a tile.
struct Running {
    float* out;   // [queries, dim]
    float* most;  // [queries] largest score so far
    float* mass;  // [queries] sum of exp(score - most)

    static int64_t floats(int64_t queries, int64_t dim) { return queries * (dim + 2); }
    Running() = default;
    Running(float* memory, int64_t queries, int64_t dim)
        : out(memory), most(memory + queries * dim), mass(most + queries) {}

    void clear(int64_t queries, int64_t dim) const {
        std::fill_n(out, queries * dim, 0.0f);
        std::fill_n(most, queries, -std::numeric_limits<float>::infinity());
        std::fill_n(mass, queries, 0.0f);
    }
};

// Scratch of one thread for tiles of up to `queries` queries.
struct AttentionScratch {
    float *scaled, *scores, *rows;
    Running total, part;

    static int64_t floats(int64_t queries, int64_t dim) {
        return queries * (dim + kUnit) + 2 * kRun * dim + 2 * Running::floats(queries, dim);
    }
    AttentionScratch(float* memory, int64_t queries, int64_t dim) {
        auto take = [&](int64_t count) { return (memory += count) - count; };
        rows = take(2 * kRun * dim);
        scores = take(queries * kUnit);
        scaled = take(queries * dim);
        total = Running(take(Running::floats(queries, dim)), queries, dim);
        part = Running(take(Running::floats(queries, dim)), queries, dim);
    }
};

// 2^x = 1 + the polynomial of x with these factors for |x| <= 1/2, to 9.2e-8 (minimax of the relative error).
constexpr float kExp2[6] = {1.0f,          6.931470037e-1f, 2.402224243e-1f,
                            5.550733581e-2f, 9.671512991e-3f, 1.326472731e-3f};

// 2^x for x <= 0, to 2 ulp; exactly 0 below -126.5 (also for -infinity), NaN stays NaN. In ranges of `N` vectors
// whose steps are interleaved: one alone would wait for itself.
template <int N>
inline void exp2_upto_0(Vec x[N]) {
    // Adding this leaves the rounded x + 127 in the low bits: the exponent of the power, 0 for the power 0.
    const Vec magic = splat(12582912.0f + 127.0f);
    Vec whole[N], power[N], p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        x[i] = _mm256_max_ps(splat(-127.0f), x[i]);  // the second operand if one is NaN
        whole[i] = _mm256_add_ps(x[i], magic);
        power[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(whole[i]), 23));
        x[i] = _mm256_sub_ps(x[i], _mm256_sub_ps(whole[i], magic));
        p[i] = fma(splat(kExp2[5]), x[i], splat(kExp2[4]));
    }
#pragma GCC unroll 4
    for (int c = 3; c >= 0; c--) {
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) p[i] = fma(p[i], x[i], splat(kExp2[c]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) x[i] = _mm256_mul_ps(p[i], power[i]);
}
inline Vec exp2_upto_0(Vec x) {
    exp2_upto_0<1>(&x);
    return x;
}

inline void scale(float* values, int64_t count, float by) {
    const Vec factor = splat(by);
    for (int64_t i = 0; i < count; i += kLanes) store(values + i, _mm256_mul_ps(load(values + i), factor));
}

// total += part, both relative to their own maximum.
inline void fold(const Running& total, const Running& part, int64_t queries, int64_t dim) {
    for (int64_t q = 0; q < queries; q++) {
        if (!(part.mass[q] > 0.0f) && part.mass[q] == part.mass[q]) continue;  // nothing visible; NaN goes on
        const float most = std::max(total.most[q], part.most[q]);
        const Vec keep = exp2_upto_0(splat(total.most[q] - most)), add = exp2_upto_0(splat(part.most[q] - most));
        total.mass[q] = total.mass[q] * _mm256_cvtss_f32(keep) + part.mass[q] * _mm256_cvtss_f32(add);
        for (int64_t i = 0; i < dim; i += kLanes) {
            const Vec kept = _mm256_mul_ps(load(total.out + q * dim + i), keep);
            store(total.out + q * dim + i, fma(load(part.out + q * dim + i), add, kept));
        }
        total.most[q] = most;
    }
}

// Memory that will be read soon. Asked for in small portions between arithmetic: all at once they would wait for
// each other, and a run is too short for the hardware's own prefetcher.
struct Ahead {
    const char* next = nullptr;
    const char* stop = nullptr;

    void ask(int64_t lines) {
        for (; lines > 0 && next < stop; lines--, next += 64) _mm_prefetch(next, _MM_HINT_T0);
    }
};

// The runs of one segment: where they lie, and which come next.
template <class T>
class Walk {
  public:
    Walk(const Pages& pages, const Tile& tile, float* scratch) : pages_(pages), tile_(tile), scratch_(scratch) {}

    // Keys (0) or values (1) of tokens [token, token + 16) as rows one behind the other; what the sequence does not
    // have is undefined but may be read.
    const T* run(int which, int64_t token) const {
        if (pages_.block_tokens >= kRun) return pages_.find<T>(tile_.table, which, tile_.head, token);
        T* rows = reinterpret_cast<T*>(scratch_);
        for (int64_t t = 0; t < kRun && token + t < tile_.length(); t += pages_.block_tokens) {
            std::memcpy(rows + t * pages_.head_dim, pages_.find<T>(tile_.table, which, tile_.head, token + t),
                        pages_.block_tokens * pages_.head_dim * sizeof(T));
        }
        return rows;
    }

    // What is read `at` tokens into a round of `width` tokens from `start`: its keys, its values, the next keys.
    Ahead ahead(int64_t start, int64_t width, int64_t at) const {
        const int which = at >= width && at < 2 * width;
        const int64_t token = start + at - (at >= 2 * width ? width : which ? width : 0);
        if (token >= tile_.length()) return {};
        const int64_t tokens = std::min<int64_t>(kRun, pages_.block_tokens);
        const T* first = pages_.find<T>(tile_.table, which, tile_.head, token & -tokens);
        return {reinterpret_cast<const char*>(first), reinterpret_cast<const char*>(first + tokens * pages_.head_dim)};
    }

  private:
    const Pages& pages_;
    const Tile& tile_;
    float* scratch_;
};

// Eight rows `step` apart, eight columns → columns [8][16], the rows being lanes.
inline void turn8(const float* rows, int64_t step, float* columns) {
    Vec v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {  // rows i and i + 4, columns of one half: no crossing of halves later
        const float* from = rows + i % 4 * step + i / 4 * 4;
        v[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 4 * step), 1);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        const Vec a = _mm256_unpacklo_ps(v[i], v[i + 1]), b = _mm256_unpackhi_ps(v[i], v[i + 1]);
        const Vec c = _mm256_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm256_unpackhi_ps(v[i + 2], v[i + 3]);
        store(columns + i * kRun, _mm256_shuffle_ps(a, c, 0x44));
        store(columns + (i + 1) * kRun, _mm256_shuffle_ps(a, c, 0xEE));
        store(columns + (i + 2) * kRun, _mm256_shuffle_ps(b, d, 0x44));
        store(columns + (i + 3) * kRun, _mm256_shuffle_ps(b, d, 0xEE));
    }
}
inline void turn8(const Half* rows, int64_t step, float* columns) {
    __m128i v[8], w[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * step));
    // Three rounds of pairing row i with row i + 4, then the results alike.
#pragma GCC unroll 3
    for (int round = 0; round < 3; round++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            w[2 * i] = _mm_unpacklo_epi16(v[i], v[i + 4]);
            w[2 * i + 1] = _mm_unpackhi_epi16(v[i], v[i + 4]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) v[i] = w[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) store(columns + i * kRun, _mm256_cvtph_ps(v[i]));
}

// Keys [16, dim] → [dim, 16] float32. Meanwhile asks for as much memory as it reads.
template <class T>
inline void turn(const T* keys, int64_t dim, float* turned, Ahead ahead) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        ahead.ask(kRun * kLanes * sizeof(T) / 64);
        turn8(keys + d, dim, turned + d * kRun);
        turn8(keys + kLanes * dim + d, dim, turned + d * kRun + kLanes);
    }
}

// Calls body<R>(first) for register tiles of up to 6 of `queries`; none is needlessly small.
template <class Body>
inline void by_rows(int64_t queries, Body body) {
    for (int64_t first = 0, left = queries; left > 0;) {
        const int64_t rows = left >= 2 * kRows ? kRows : left > kRows ? (left + 1) / 2 : left;
        switch (rows) {
            case 1: body.template operator()<1>(first); break;
            case 2: body.template operator()<2>(first); break;
            case 3: body.template operator()<3>(first); break;
            case 4: body.template operator()<4>(first); break;
            case 5: body.template operator()<5>(first); break;
            default: body.template operator()<6>(first);
        }
        first += rows;
        left -= rows;
    }
}

// scores [R, 16] = q [R, dim] · turned keys [dim, 16].
template <int R>
inline void score(const float* q, const float* turned, int64_t dim, float* scores) {
    Vec acc[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int64_t d = 0; d < dim; d++) {
        const Vec left = load(turned + d * kRun), right = load(turned + d * kRun + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Vec x = splat(q[r * dim + d]);
            acc[r][0] = fma(x, left, acc[r][0]);
            acc[r][1] = fma(x, right, acc[r][1]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        store(scores + r * kUnit, acc[r][0]);
        store(scores + r * kUnit + kLanes, acc[r][1]);
    }
}

// Turn the first `width` of a query's scores into weights, of which the first `visible` are not 0, and bring its
// out [dim], most and mass to the new maximum.
inline void weigh(float* scores, int64_t width, int64_t visible, float* out, int64_t dim, float& most, float& mass) {
    if (visible <= 0) {
        std::fill_n(scores, width, 0.0f);
        return;
    }
    for (int64_t t = visible; t < width; t++) scores[t] = -std::numeric_limits<float>::infinity();
    Vec top = _mm256_max_ps(load(scores), load(scores + kLanes));
    for (int64_t t = kRun; t < width; t += kRun) {
        top = _mm256_max_ps(top, _mm256_max_ps(load(scores + t), load(scores + t + kLanes)));
    }
    const float highest = std::max(most, largest(top));
    const Vec base = splat(highest);
    Vec total = _mm256_setzero_ps();
    for (int64_t t = 0; t < width; t += kRun) {
        Vec v[2] = {_mm256_sub_ps(load(scores + t), base), _mm256_sub_ps(load(scores + t + kLanes), base)};
        exp2_upto_0<2>(v);
        store(scores + t, v[0]);
        store(scores + t + kLanes, v[1]);
        total = _mm256_add_ps(total, _mm256_add_ps(v[0], v[1]));
    }
    if (highest > most) {
        const float keep = _mm256_cvtss_f32(exp2_upto_0(splat(most - highest)));
        mass *= keep;
        scale(out, dim, keep);
        most = highest;
    }
    mass += sum(total);
}

// The same for all queries of a tile, whose scores [queries, 64] are of tokens from `start`.
inline void weigh_all(float* scores, int64_t width, const Running& state, const Tile& tile, int64_t dim,
                      int64_t start) {
    int64_t q = 0;
    for (int64_t t = 0; t < tile.tokens; t++) {
        const int64_t visible = tile.first_position + t + 1 - start;
        for (int64_t i = 0; i < tile.group; i++, q++) {
            weigh(scores + q * kUnit, width, visible, state.out + q * dim, dim, state.most[q], state.mass[q]);
        }
    }
}

// out [R, V × 8] += weights [R, count] · values [count, V × 8], in one chain of sums that starts at out.
template <int R, int V, class T>
inline void add_values(int64_t count, const float* weights, const T* values, int64_t dim, float* out,
                       Ahead* ahead = nullptr) {
    Vec acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) acc[r][j] = load(out + r * dim + j * kLanes);
    }
    for (int64_t t = 0; t < count; t++, values += dim) {
        if (ahead) ahead->ask(V * kLanes * sizeof(T) / 64);
        Vec value[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) value[j] = load(values + j * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Vec weight = splat(weights[r * kUnit + t]);
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) acc[r][j] = fma(weight, value[j], acc[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) store(out + r * dim + j * kLanes, acc[r][j]);
    }
}

// The same for all columns, of few rows; meanwhile asks for as much memory as it reads. Few rows leave registers
// for four vectors of columns.
template <int R, class T>
inline void gather_few(int64_t count, const float* weights, const T* values, int64_t dim, float* out, Ahead ahead) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
        add_values<R, 4>(count, weights, values + d, dim, out + d, &ahead);
    }
    for (; d < dim; d += 2 * kLanes) add_values<R, 2>(count, weights, values + d, dim, out + d, &ahead);
}

// A run as float32, for many queries: expanded once into `scratch` [16, dim] if it is 16 bit.
inline const float* expand_run(const float* rows, int64_t, float*) { return rows; }
inline const float* expand_run(const Half* rows, int64_t dim, float* scratch) {
    for (int64_t i = 0; i < kRun * dim; i += kLanes) store(scratch + i, load(rows + i));
    return scratch;
}

// part = attention of the tile's scaled queries over one segment.
template <class T>
void attend_segment(const Pages& pages, const Tile& tile, int64_t segment, const AttentionScratch& s,
                    const Running& part) {
    const int64_t dim = pages.head_dim, queries = tile.queries();
    const int64_t stop = std::min((segment + 1) * kSegment, tile.length());
    const Walk<T> walk(pages, tile, s.rows);
    float* const turned = s.rows + kRun * dim;
    part.clear(queries, dim);
    for (int64_t start = segment * kSegment; start < stop; start += kUnit) {
        const int64_t end = std::min(start + kUnit, stop), width = (end - start + kRun - 1) / kRun * kRun;
        for (int64_t at = 0; at < width; at += kRun) {
            turn(walk.run(0, start + at), dim, turned, walk.ahead(start, width, at + kAhead));
            by_rows(queries, [&]<int R>(int64_t q) {
                score<R>(s.scaled + q * dim, turned, dim, s.scores + q * kUnit + at);
            });
        }
        weigh_all(s.scores, width, part, tile, dim, start);
        for (int64_t at = 0; at < width; at += kRun) {
            Ahead next = walk.ahead(start, width, width + at + kAhead);
            const int64_t count = std::min<int64_t>(kRun, end - start - at);
            const T* values = walk.run(1, start + at);
            if (queries <= kFewRows) {
                by_rows(queries, [&]<int R>(int64_t q) {
                    if constexpr (R <= kFewRows) {
                        gather_few<R>(count, s.scores + q * kUnit + at, values, dim, part.out + q * dim, next);
                    }
                });
                continue;
            }
            const float* expanded = expand_run(values, dim, turned);
            by_rows(queries, [&]<int R>(int64_t q) {
                for (int64_t d = 0; d < dim; d += 2 * kLanes) {
                    next.ask(kAskPerTile);
                    add_values<R, 2>(count, s.scores + q * kUnit + at, expanded + d, dim, part.out + q * dim + d);
                }
            });
        }
    }
}

// The tile's queries, to be multiplied with keys: q [tokens, ldq] points at the first of its heads.
inline void scale_queries(const Tile& tile, int64_t dim, const float* q, int64_t ldq, float* scaled) {
    const Vec factor = splat(1.44269504f / std::sqrt(float(dim)));
    for (int64_t t = 0; t < tile.tokens; t++) {
        for (int64_t i = 0; i < tile.group * dim; i += kLanes) {
            store(scaled + t * tile.group * dim + i, _mm256_mul_ps(load(q + t * ldq + i), factor));
        }
    }
}

// out [tokens, ldo] = the state's weighted means; it points at the first of the tile's heads.
inline void write_means(const Tile& tile, int64_t dim, const Running& total, float* out, int64_t ldo) {
    for (int64_t i = 0; i < tile.queries(); i++) {
        const Vec share = splat(1.0f / total.mass[i]);
        float* to = out + i / tile.group * ldo + i % tile.group * dim;
        for (int64_t d = 0; d < dim; d += kLanes) store(to + d, _mm256_mul_ps(load(total.out + i * dim + d), share));
    }
}

}  // namespace hortator
