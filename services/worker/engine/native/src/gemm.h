// Matrix products with packed weights: c [m, n] = a [m, k] · wᵀ, weights float32 or 16 bit, arithmetic float32.
//
// Every element of c is one chain of fused multiply-adds over k in ascending order, cut into the same stretches
// whatever m is: a row's result does not depend on the rows beside it.
#pragma once
#include <algorithm>
#include <cstddef>

#include "simd.h"
#include "team.h"

namespace hortator {

constexpr int kPanel = 16;      // outputs side by side in one panel: two vectors
constexpr int kTileRows = 6;    // 6 × 2 accumulators leave registers for weights and one broadcast
constexpr int kGroup = 2;       // panels per task
constexpr int kStretch = 320;   // longest stretch of k: an expanded panel of it stays in the L1 cache
constexpr int kRowBlock = 192;  // rows × stretch of a stay in the L2 cache

// Weights [n, k] as panels [n / 16][k][16], zero beyond n; bias [n rounded up to 16] or null.
struct Matrix {
    const void* panels;
    const float* bias;
    int64_t n;
    int64_t k;
};

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Length of the stretches k is cut into; a multiple of 8 so that expanding works on whole vectors.
inline int64_t stretch_of(int64_t k) {
    const int64_t parts = (k + kStretch - 1) / kStretch;
    return ((k + parts - 1) / parts + 7) / 8 * 8;
}

enum class Into { kStore, kAdd };

// c [R, P × 16] = or += a [R, k] · b, b being P panels `panel_step` apart whose rows are `ldb` apart.
template <int R, int P, class W>
inline void tile(int64_t k, const float* a, int64_t lda, const W* b, int64_t ldb, int64_t panel_step, float* c,
                 int64_t ldc, Into into, const float* bias) {
    Vec acc[R][2 * P];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; j++) acc[r][j] = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < k; i++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const Vec left = load(b + i * ldb + p * panel_step);
            const Vec right = load(b + i * ldb + p * panel_step + kLanes);
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
            float* out = c + r * ldc + j * kLanes;
            Vec v = acc[r][j];
            if (into == Into::kAdd) v = _mm256_add_ps(load(out), v);
            if (bias) v = _mm256_add_ps(v, load(bias + j * kLanes));
            store(out, v);
        }
    }
}

// One call of `tile` for a number of rows known only now.
template <int P, class W>
inline void tile_rows(int rows, int64_t k, const float* a, int64_t lda, const W* b, int64_t ldb, int64_t panel_step,
                      float* c, int64_t ldc, Into into, const float* bias) {
    switch (rows) {
        case 1: return tile<1, P>(k, a, lda, b, ldb, panel_step, c, ldc, into, bias);
        case 2: return tile<2, P>(k, a, lda, b, ldb, panel_step, c, ldc, into, bias);
        case 3: return tile<3, P>(k, a, lda, b, ldb, panel_step, c, ldc, into, bias);
        case 4: return tile<4, P>(k, a, lda, b, ldb, panel_step, c, ldc, into, bias);
        case 5: return tile<5, P>(k, a, lda, b, ldb, panel_step, c, ldc, into, bias);
        default: return tile<6, P>(k, a, lda, b, ldb, panel_step, c, ldc, into, bias);
    }
}

// c [rows, 16] = or += a · b for any number of rows, in tiles of nearly equal height.
template <class W>
inline void strip(int64_t rows, int64_t k, const float* a, int64_t lda, const W* b, int64_t ldb, float* c, int64_t ldc,
                  Into into, const float* bias) {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = rows * t / tiles, stop = rows * (t + 1) / tiles;
        tile_rows<1>(int(stop - first), k, a + first * lda, lda, b, ldb, 0, c + first * ldc, ldc, into, bias);
    }
}

// A panel's stretch as float32; 16-bit panels are expanded into `scratch` [k, 16].
inline const float* expand(const float* panel, int64_t, float*) { return panel; }
inline const float* expand(const Half* panel, int64_t k, float* scratch) {
    for (int64_t i = 0; i < k * kPanel; i += kLanes) store(scratch + i, load(panel + i));
    return scratch;
}

// Columns of panels [panel, panel + count) for rows of `a`: c points at the first of these columns.
template <class W>
inline void panel_group(const Matrix& w, int64_t panel, int count, int64_t rows, const float* a, int64_t lda, float* c,
                        int64_t ldc, Into into) {
    alignas(64) float scratch[kStretch * kPanel];
    const int64_t stretch = stretch_of(w.k), panel_size = w.k * kPanel;
    const W* panels = static_cast<const W*>(w.panels) + panel * panel_size;
    for (int64_t first = 0; first < w.k; first += stretch) {
        const int64_t length = std::min(stretch, w.k - first);
        const Into how = first == 0 ? into : Into::kAdd;
        const float* bias = w.bias && first == 0 ? w.bias + panel * kPanel : nullptr;
        const W* part = panels + first * kPanel;
        if (rows <= 3 && count == kGroup) {
            tile_rows<kGroup>(int(rows), length, a + first, lda, part, kPanel, panel_size, c, ldc, how, bias);
            continue;
        }
        for (int p = 0; p < count; p++) {
            const float* bias_p = bias ? bias + p * kPanel : nullptr;
            if (rows <= kTileRows) {
                strip(rows, length, a + first, lda, part + p * panel_size, kPanel, c + p * kPanel, ldc, how, bias_p);
            } else {
                const float* b = expand(part + p * panel_size, length, scratch);
                strip(rows, length, a + first, lda, b, kPanel, c + p * kPanel, ldc, how, bias_p);
            }
        }
    }
}

// c [m, ldc] = or += a · wᵀ by the whole team; ldc is at least n rounded up to 16. Ends with a barrier.
template <class W>
void multiply(Team& team, const Matrix& w, int64_t m, const float* a, int64_t lda, float* c, int64_t ldc, Into into) {
    const int64_t panels = panels_of(w.n), groups = (panels + kGroup - 1) / kGroup;
    team.each(groups, [&](int64_t g) {
        const int64_t panel = g * kGroup;
        const int count = int(std::min<int64_t>(kGroup, panels - panel));
        for (int64_t first = 0; first < m; first += kRowBlock) {
            const int64_t rows = std::min<int64_t>(kRowBlock, m - first);
            panel_group<W>(w, panel, count, rows, a + first * lda, lda, c + first * ldc + panel * kPanel, ldc, into);
        }
    });
}

// act [m, n / 2] = silu(gate) · up, the panels of w being gate and up in turn. Ends with a barrier.
template <class W>
void multiply_silu(Team& team, const Matrix& w, int64_t m, const float* a, int64_t lda, float* act, int64_t ld_act) {
    const int64_t pairs = panels_of(w.n) / 2;
    team.each(pairs, [&](int64_t pair) {
        alignas(64) float both[kRowBlock * 2 * kPanel];
        for (int64_t first = 0; first < m; first += kRowBlock) {
            const int64_t rows = std::min<int64_t>(kRowBlock, m - first);
            panel_group<W>(w, 2 * pair, 2, rows, a + first * lda, lda, both, 2 * kPanel, Into::kStore);
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

// Row `row` of the weights as float32, e.g. an embedding.
template <class W>
inline void unpack_row(const Matrix& w, int64_t row, float* out) {
    const W* lane = static_cast<const W*>(w.panels) + row / kPanel * w.k * kPanel + row % kPanel;
    for (int64_t i = 0; i < w.k; i++) out[i] = to_float(lane[i * kPanel]);
}

// Panels of weights [n, k] row by row; values beyond the range of 16 bit are clamped to it.
template <class W>
void pack(Team& team, const float* weights, int64_t n, int64_t k, W* panels) {
    team.each(panels_of(n), [&](int64_t p) {
        for (int64_t i = 0; i < k; i++) {
            for (int64_t j = 0; j < kPanel; j++) {
                float v = p * kPanel + j < n ? weights[(p * kPanel + j) * k + i] : 0.0f;
                if (sizeof(W) == sizeof(Half)) v = v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
                from_float(v, panels + (p * k + i) * kPanel + j);
            }
        }
    });
}

}  // namespace hortator
