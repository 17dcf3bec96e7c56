// Int8: quantising weights and activations, and products of integers.
//
// A product is exact in int32 over each group of kCodeGroup inputs; the groups' sums, each times the scale of its
// activations, are one chain of fused multiply-adds in ascending order, and the scale of the output comes last.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "matrix.h"
#include "simd.h"
#include "team.h"

namespace hortator {

constexpr int kCodeGroup = 64;  // inputs that share a scale
constexpr int kCodeTop = 127;   // largest code of an activation
constexpr int kCodeRows = 8;    // rows of an integer tile: as many accumulators
constexpr int64_t kQuantizeGrain = 2;

// Memory for the activations of one product: values [m, k], scales [m, k / kCodeGroup].
struct Codes {
    int8_t* values;
    float* scales;
};

// Quantised activations, rows `ld` values apart.
struct CodedRows {
    const int8_t* values;
    const float* scales;
    int64_t ld;
    CodedRows from(int64_t row) const { return {values + row * ld, scales + row * (ld / kCodeGroup), ld}; }
};

inline int8_t code_of(float v, float factor) {
    const float code = v * factor;
    return int8_t(code == code ? std::lrint(code) : 0);
}

// Scale of weights row [k]; *factor turns one into its code. NaN, and codes of 0, if one is not finite.
template <class W>
inline float scale_of(const float* row, int64_t k, float* factor) {
    float most = 0.0f, broken = 0.0f;
    for (int64_t i = 0; i < k; i++) {
        most = std::max(most, std::fabs(row[i]));
        broken += row[i] * 0.0f;
    }
    const bool usable = broken == 0.0f && most > 0.0f;
    *factor = usable ? float(W::kTop) / most : 0.0f;
    return broken == 0.0f ? most / float(W::kTop) : std::numeric_limits<float>::quiet_NaN();
}

// Codes and scale of 64 activations. The scale is NaN if one of them is not finite.
inline void quantize_group(const float* x, int8_t* codes, float* scale) {
    const Vec magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    Vec most = _mm256_setzero_ps(), broken = _mm256_setzero_ps();
    for (int i = 0; i < kCodeGroup; i += kLanes) {
        const Vec v = load(x + i);
        most = _mm256_max_ps(_mm256_and_ps(v, magnitude), most);
        broken = fma(v, _mm256_setzero_ps(), broken);
    }
    const float top = largest(most);
    const bool finite = sum(broken) == 0.0f;
    *scale = finite ? top / float(kCodeTop) : std::numeric_limits<float>::quiet_NaN();
    const Vec factor = splat(finite && top > 0.0f ? float(kCodeTop) / top : 0.0f);
    for (int i = 0; i < kCodeGroup; i += 4 * kLanes) {
        __m256i v[4];
        for (int j = 0; j < 4; j++) v[j] = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + i + j * kLanes), factor));
        const __m256i low = _mm256_packs_epi32(v[0], v[1]), high = _mm256_packs_epi32(v[2], v[3]);
        // Packing works in halves: put their quarters back into order.
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), packed);
    }
}

// a [m, ≥ k - 63], rows lda apart and zero up to k or the end of a group's inputs, as codes. Ends with a barrier.
inline CodedRows quantize(Team& team, int64_t m, int64_t k, const float* a, int64_t lda, const Codes& room) {
    const int64_t groups = k / kCodeGroup;
    team.each(m, kQuantizeGrain, [&](int64_t r) {
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = g * kCodeGroup, there = std::min<int64_t>(kCodeGroup, lda - first);
            const float* x = a + r * lda + first;
            float padded[kCodeGroup];
            if (there < kCodeGroup) {
                std::fill(std::copy(x, x + there, padded), padded + kCodeGroup, 0.0f);
                x = padded;
            }
            quantize_group(x, room.values + r * k + first, room.scales + r * groups + g);
        }
    });
    return {room.values, room.scales, k};
}

// Four products each of codes x and weights w, whose magnitudes are `size`, in 16 bit: pairs of neighbours.
inline __m256i pairs(__m256i size, __m256i w, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    return _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(four), w));
}

// c [R, 8] = or += x [R, k] · w, w being half a panel.
template <int R>
inline void integer_tile(int64_t k, const CodedRows& x, const int8_t* w, float* c, int64_t ldc, Into into,
                         Channels channels) {
    const __m256i ones = _mm256_set1_epi16(1);
    Vec sums[R];
    for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < k / kCodeGroup; g++) {
        __m256i acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_si256();
        for (int64_t i = g * kCodeGroup; i < (g + 1) * kCodeGroup; i += 8) {
            const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i * kLanes));
            const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + (i + 4) * kLanes));
            const __m256i size_left = _mm256_abs_epi8(left), size_right = _mm256_abs_epi8(right);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const int8_t* at = x.values + r * x.ld + i;
                // At most 4 × 63 × 127: below the limit of 16 bit.
                const __m256i four = _mm256_add_epi16(pairs(size_left, left, at), pairs(size_right, right, at + 4));
                acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(four, ones));
            }
        }
        const float* scales = x.scales + g;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            sums[r] = fma(_mm256_cvtepi32_ps(acc[r]), splat(scales[r * (x.ld / kCodeGroup)]), sums[r]);
        }
    }
    for (int r = 0; r < R; r++) channels.put(sums[r], 0, c + r * ldc, into);
}

// Columns of one panel for any number of rows, in tiles of nearly equal height.
inline void integer_panel(const Matrix& w, int64_t panel, int64_t rows, const CodedRows& x, float* c, int64_t ldc,
                          Into into) {
    const int8_t* weights = static_cast<const int8_t*>(w.panels) + panel * w.k * kPanel;
    const int64_t tiles = (rows + kCodeRows - 1) / kCodeRows;
    for (int half = 0; half < kPanel; half += kLanes) {
        const int8_t* b = weights + half * w.k;
        const Channels channels = w.channels(panel, true).from(half);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = rows * t / tiles, stop = rows * (t + 1) / tiles;
            const CodedRows part = x.from(first);
            float* out = c + first * ldc + half;
            switch (stop - first) {
                case 1: integer_tile<1>(w.k, part, b, out, ldc, into, channels); break;
                case 2: integer_tile<2>(w.k, part, b, out, ldc, into, channels); break;
                case 3: integer_tile<3>(w.k, part, b, out, ldc, into, channels); break;
                case 4: integer_tile<4>(w.k, part, b, out, ldc, into, channels); break;
                case 5: integer_tile<5>(w.k, part, b, out, ldc, into, channels); break;
                case 6: integer_tile<6>(w.k, part, b, out, ldc, into, channels); break;
                case 7: integer_tile<7>(w.k, part, b, out, ldc, into, channels); break;
                default: integer_tile<8>(w.k, part, b, out, ldc, into, channels); break;
            }
        }
    }
}

}  // namespace hortator
