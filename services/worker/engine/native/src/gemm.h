// Matrix products with packed weights: c [m, n] = a [m, k] · wᵀ, weights in any format, a and c float32.
//
// Every element of c is one chain of fused multiply-adds over k in ascending order, cut into the same stretches
// whatever m is: a row's result does not depend on the rows beside it. Integer products are in int8.h.
#pragma once
#include <algorithm>
#include <cstddef>

#include "int8.h"
#include "matrix.h"
#include "simd.h"
#include "team.h"

namespace hortator {

constexpr int kTileRows = 6;    // 6 × 2 accumulators leave registers for weights and one broadcast
constexpr int kGroup = 2;       // panels per task
constexpr int kStretch = 320;   // longest stretch of k: an expanded panel of it stays in the L1 cache
constexpr int kRowBlock = 192;  // rows × stretch of a stay in the L2 cache

// Length of the stretches k is cut into; a multiple of 8 so that expanding works on whole vectors.
inline int64_t stretch_of(int64_t k) {
    const int64_t parts = (k + kStretch - 1) / kStretch;
    return ((k + parts - 1) / parts + 7) / 8 * 8;
}

// What a tile does on the side. Memory needed soon is asked for, `step` bytes for each k: the hardware alone looks
// less far. And weights stored in fewer bits are kept as float32 [k, 16], if `kept` says where, for the tiles that
// follow: storing them hides behind the arithmetic.
struct Aside {
    const char* soon;
    int64_t step;
    float* kept;
};

// c [R, P × 16] = or += a [R, k] · b, b being P panels `panel_step` apart.
template <int R, int P, bool Keep, class W>
inline void tile(int64_t k, const float* a, int64_t lda, const W* b, int64_t panel_step, const Aside& aside, float* c,
                 int64_t ldc, Into into, Channels channels) {
    Vec acc[R][2 * P];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; j++) acc[r][j] = _mm256_setzero_ps();
    }
    const char* soon = aside.soon;
    for (int64_t i = 0; i < k; i++, soon += aside.step) {
        _mm_prefetch(soon, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const Vec left = load(b + i * kPanel + p * panel_step);
            const Vec right = load(b + i * kPanel + p * panel_step + kLanes);
            if constexpr (Keep) {
                store(aside.kept + i * kPanel, left);
                store(aside.kept + i * kPanel + kLanes, right);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Vec x = splat(a[r * lda + i]);
                acc[r][2 * p] = fma(x, left, acc[r][2 * p]);
                acc[r][2 * p + 1] = fma(x, right, acc[r][2 * p + 1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; j++) {
            channels.put(acc[r][j], j * kLanes, c + r * ldc + j * kLanes, into);
        }
    }
}

// One call of `tile` for a number of rows known only now.
template <int P, bool Keep, class W>
inline void tile_rows(int rows, int64_t k, const float* a, int64_t lda, const W* b, int64_t panel_step,
                      const Aside& aside, float* c, int64_t ldc, Into into, Channels channels) {
    switch (rows) {
        case 1: return tile<1, P, Keep>(k, a, lda, b, panel_step, aside, c, ldc, into, channels);
        case 2: return tile<2, P, Keep>(k, a, lda, b, panel_step, aside, c, ldc, into, channels);
        case 3: return tile<3, P, Keep>(k, a, lda, b, panel_step, aside, c, ldc, into, channels);
        case 4: return tile<4, P, Keep>(k, a, lda, b, panel_step, aside, c, ldc, into, channels);
        case 5: return tile<5, P, Keep>(k, a, lda, b, panel_step, aside, c, ldc, into, channels);
        default: return tile<6, P, Keep>(k, a, lda, b, panel_step, aside, c, ldc, into, channels);
    }
}

// c [rows, 16] = or += a · b for any number of rows, in tiles of nearly equal height. `next` is what comes after b.
template <class W>
inline void strip(int64_t rows, int64_t k, const float* a, int64_t lda, const W* b, const W* next, float* c,
                  int64_t ldc, Into into, Channels channels) {
    constexpr bool narrow = sizeof(W) < sizeof(float);
    alignas(64) float wide[narrow ? kStretch * kPanel : 1];
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const Aside nothing{reinterpret_cast<const char*>(b), 0, nullptr};
    const Aside last{reinterpret_cast<const char*>(next), int64_t(kPanel * sizeof(W)), nullptr};
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = rows * t / tiles, height = rows * (t + 1) / tiles - first;
        const float* from = a + first * lda;
        float* to = c + first * ldc;
        const Aside& aside = t + 1 == tiles ? last : nothing;
        if (!narrow || tiles == 1) {
            tile_rows<1, false>(int(height), k, from, lda, b, 0, aside, to, ldc, into, channels);
        } else if (t == 0) {
            const Aside keeping{nothing.soon, 0, wide};
            tile_rows<1, true>(int(height), k, from, lda, b, 0, keeping, to, ldc, into, channels);
        } else {
            const float* whole = wide;
            tile_rows<1, false>(int(height), k, from, lda, whole, 0, aside, to, ldc, into, channels);
        }
    }
}

// The left side of a product as its kernel reads it: `ready` makes it of a [m, k], with the whole team.
template <class W>
struct Left {
    const float* a;
    int64_t ld;
    Left from(int64_t row) const { return {a + row * ld, ld}; }
    static Left ready(Team&, int64_t, int64_t, const float* a, int64_t lda, const Codes&) { return {a, lda}; }
};
template <>
struct Left<Int8Dynamic> : CodedRows {
    Left from(int64_t row) const { return {CodedRows::from(row)}; }
    static Left ready(Team& team, int64_t m, int64_t k, const float* a, int64_t lda, const Codes& room) {
        return {quantize(team, m, k, a, lda, room)};
    }
};

// Columns of panels [panel, panel + count) for `rows` rows: c points at the first of these columns.
template <class W>
inline void panel_group(const Matrix& w, int64_t panel, int count, int64_t rows, const Left<W>& x, float* c,
                        int64_t ldc, Into into) {
    const int64_t stretch = stretch_of(w.k), panel_size = w.k * kPanel;
    const W* panels = static_cast<const W*>(w.panels) + panel * panel_size;
    for (int64_t first = 0; first < w.k; first += stretch) {
        const int64_t length = std::min(stretch, w.k - first);
        const Into how = first == 0 ? into : Into::kAdd;
        const Channels channels = w.channels(panel, first == 0);
        const float* a = x.a + first;
        const W* part = panels + first * kPanel;
        if (rows <= 3 && count == kGroup) {
            const Aside aside{reinterpret_cast<const char*>(part), 0, nullptr};
            tile_rows<kGroup, false>(int(rows), length, a, x.ld, part, panel_size, aside, c, ldc, how, channels);
            continue;
        }
        for (int p = 0; p < count; p++) {
            const W* b = part + p * panel_size;
            const W* next = p + 1 < count ? b + panel_size : part + length * kPanel;
            strip(rows, length, a, x.ld, b, next, c + p * kPanel, ldc, how, channels.from(p * kPanel));
        }
    }
}
template <>
inline void panel_group(const Matrix& w, int64_t panel, int count, int64_t rows, const Left<Int8Dynamic>& x, float* c,
                        int64_t ldc, Into into) {
    for (int p = 0; p < count; p++) integer_panel(w, panel + p, rows, x, c + p * kPanel, ldc, into);
}

// c [m, ldc] = or += a · wᵀ by the whole team; ldc is at least n rounded up to 16. Ends with a barrier.
template <class W>
void multiply_as(Team& team, const Matrix& w, int64_t m, const float* a, int64_t lda, float* c, int64_t ldc, Into into,
                 const Codes& room) {
    const int64_t panels = panels_of(w.n), groups = (panels + kGroup - 1) / kGroup;
    const Left<W> x = Left<W>::ready(team, m, w.k, a, lda, room);
    team.each(groups, [&](int64_t g) {
        const int64_t panel = g * kGroup;
        const int count = int(std::min<int64_t>(kGroup, panels - panel));
        for (int64_t first = 0; first < m; first += kRowBlock) {
            const int64_t rows = std::min<int64_t>(kRowBlock, m - first);
            panel_group<W>(w, panel, count, rows, x.from(first), c + first * ldc + panel * kPanel, ldc, into);
        }
    });
}

inline void multiply(Team& team, const Matrix& w, int64_t m, const float* a, int64_t lda, float* c, int64_t ldc,
                     Into into, const Codes& room) {
    with_weights(w.format, [&]<class W>(W*) { multiply_as<W>(team, w, m, a, lda, c, ldc, into, room); });
}

// act [m, n / 2] = silu(gate) · up, the panels of w being gate and up in turn. Ends with a barrier.
template <class W>
void multiply_silu_as(Team& team, const Matrix& w, int64_t m, const float* a, int64_t lda, float* act, int64_t ld_act,
                      const Codes& room) {
    const int64_t pairs = panels_of(w.n) / 2;
    const Left<W> x = Left<W>::ready(team, m, w.k, a, lda, room);
    team.each(pairs, [&](int64_t pair) {
        alignas(64) float both[kRowBlock * 2 * kPanel];
        for (int64_t first = 0; first < m; first += kRowBlock) {
            const int64_t rows = std::min<int64_t>(kRowBlock, m - first);
            panel_group<W>(w, 2 * pair, 2, rows, x.from(first), both, 2 * kPanel, Into::kStore);
            for (int64_t r = 0; r < rows; r++) {
                for (int j = 0; j < kPanel; j += kLanes) {
                    const Vec gate = load(both + r * 2 * kPanel + j), up = load(both + r * 2 * kPanel + kPanel + j);
                    const Vec below = _mm256_add_ps(splat(1.0f), exp(_mm256_sub_ps(_mm256_setzero_ps(), gate)));
                    store(act + (first + r) * ld_act + pair * kPanel + j, _mm256_mul_ps(_mm256_div_ps(gate, below), up));
                }
            }
        }
    });
}

inline void multiply_silu(Team& team, const Matrix& w, int64_t m, const float* a, int64_t lda, float* act,
                          int64_t ld_act, const Codes& room) {
    with_weights(w.format, [&]<class W>(W*) { multiply_silu_as<W>(team, w, m, a, lda, act, ld_act, room); });
}

// The first `size` inputs of row `row` of the weights as float32, e.g. an embedding.
inline void unpack_row(const Matrix& w, int64_t row, int64_t size, float* out) {
    with_weights(w.format, [&]<class W>(W*) {
        const W* panel = static_cast<const W*>(w.panels) + row / kPanel * w.k * kPanel;
        for (int64_t i = 0; i < size; i++) {
            const W& v = panel[place<W>(w.k, i, row % kPanel)];
            if constexpr (is_int8<W>) {
                out[i] = float(code_in(v)) * w.scale[row];
            } else {
                out[i] = to_float(v);
            }
        }
    });
}

// Panels of weights [n, k] row by row, where w.n is n and w.k at least k; fills w.scale of formats that have
// one. Values beyond the range of 16 bit are clamped to it.
template <class W>
void pack_as(Team& team, const float* weights, int64_t k, const Matrix& w) {
    W* panels = static_cast<W*>(const_cast<void*>(w.panels));
    float* scale = const_cast<float*>(w.scale);
    team.each(panels_of(w.n), [&](int64_t p) {
        W* panel = panels + p * w.k * kPanel;
        for (int64_t j = 0; j < kPanel; j++) {
            const bool there = p * kPanel + j < w.n;
            const float* row = weights + (p * kPanel + j) * k;
            float factor = 0.0f;
            if constexpr (is_int8<W>) scale[p * kPanel + j] = there ? scale_of<W>(row, k, &factor) : 0.0f;
            for (int64_t i = 0; i < w.k; i++) {
                const float v = there && i < k ? row[i] : 0.0f;
                W* to = panel + place<W>(w.k, i, j);
                if constexpr (is_int8<W>) {
                    *to = stored<W>(code_of(v, factor));
                } else if constexpr (sizeof(W) == sizeof(Half)) {
                    from_float(v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v, to);
                } else {
                    *to = v;
                }
            }
        }
    });
}
inline void pack(Team& team, const float* weights, int64_t k, const Matrix& w) {
    with_weights(w.format, [&]<class W>(W*) { pack_as<W>(team, weights, k, w); });
}

}  // namespace hortator
