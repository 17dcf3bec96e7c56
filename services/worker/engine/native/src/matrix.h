// A packed matrix, and how results are put down.
#pragma once
#include "simd.h"

namespace hortator {

constexpr int kPanel = 16;  // outputs side by side in one panel: two vectors

enum class Into { kStore, kAdd };

// What the outputs of a panel have of their own; null where there is none.
struct Channels {
    const float *scale, *bias;

    Channels from(int64_t output) const {
        return {scale ? scale + output : nullptr, bias ? bias + output : nullptr};
    }
    // Eight outputs from `output` on: out = or += sums · scale + bias. Fused by hand: left to the compiler, the
    // rounding would depend on the tile.
    void put(Vec sums, int64_t output, float* out, Into into) const {
        if (scale) {
            Vec base = into == Into::kAdd ? load(out) : _mm256_setzero_ps();
            if (bias) base = _mm256_add_ps(base, load(bias + output));
            return store(out, fma(sums, load(scale + output), base));
        }
        if (into == Into::kAdd) sums = _mm256_add_ps(load(out), sums);
        if (bias) sums = _mm256_add_ps(sums, load(bias + output));
        store(out, sums);
    }
};

// Weights [n, k] as panels [n / 16][k][16], zero beyond n; those of Int8Dynamic as [n / 16][2][k / 4][8][4].
// bias and scale [n rounded up to 16] or null.
struct Matrix {
    const void* panels;
    const float *bias, *scale;
    int64_t n;
    int64_t k;
    Format format;

    Channels channels(int64_t panel, bool with_bias) const {
        return Channels{scale, with_bias ? bias : nullptr}.from(panel * kPanel);
    }
};

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Where weight (output j, input i) stands in its panel.
template <class W>
inline int64_t place(int64_t, int64_t i, int64_t j) {
    return i * kPanel + j;
}
template <>
inline int64_t place<Int8Dynamic>(int64_t k, int64_t i, int64_t j) {
    return j / kLanes * k * kLanes + (i / 4 * kLanes + j % kLanes) * 4 + i % 4;
}

}  // namespace hortator
