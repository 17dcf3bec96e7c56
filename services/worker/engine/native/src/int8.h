// Int8: quantising weights and activations, and products of integers.
//
// A product is exact in int32 over each group of kCodeGroup inputs; the groups' sums, each times the scale of its
// activations, are one chain of fused multiply-adds in ascending order, and the scale of the output comes last.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "matrix.h"
#include "simd.h"
#include "team.h"

namespace hortator {

constexpr int kCodeGroup = 64;  // inputs that share a scale
constexpr int kCodeTop = 127;   // largest code of an activation
constexpr int kCodeRows = 4;    // 4 × 2 accumulators leave registers for weights and one activation
constexpr int kCodeRun = 8;     // inputs whose products are added up in 16 bit
constexpr int kCodeRunBytes = 12;  // of an activation's run: 8 codes, two corrections of 16 bit
constexpr int64_t kQuantizeGrain = 2;

// Memory for the activations of one product: runs [m, k / 8] of 12 bytes, scales [m, k / kCodeGroup].
struct Codes {
    int8_t* runs;
    float* scales;
};

// Quantised activations of `groups` groups a row. A run's corrections are what the offset of the weights adds to
// its products, negated: of its inputs 0, 1, 4, 5 and 2, 3, 6, 7.
struct CodedRows {
    const int8_t* runs;
    const float* scales;
    int64_t groups;

    int64_t ld() const { return groups * (kCodeGroup / kCodeRun * kCodeRunBytes); }
    CodedRows from(int64_t row) const { return {runs + row * ld(), scales + row * groups, groups}; }
};

inline int code_in(Int8 w) { return w.code; }
inline int code_in(Int8Dynamic w) { return w.raised - Int8Dynamic::kOffset; }
template <class W>
inline W stored(int8_t code) {
    if constexpr (requires { W::kOffset; }) {
        return {uint8_t(code + W::kOffset)};
    } else {
        return {code};
    }
}

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

// Runs and scale of 64 activations. The scale is NaN if one of them is not finite.
inline void quantize_group(const float* x, int8_t* runs, float* scale) {
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
    alignas(32) int8_t codes[4 * kLanes];
    alignas(32) int32_t corrections[kLanes];
    for (int i = 0; i < kCodeGroup; i += 4 * kLanes) {
        __m256i v[4];
        for (int j = 0; j < 4; j++) v[j] = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + i + j * kLanes), factor));
        const __m256i low = _mm256_packs_epi32(v[0], v[1]), high = _mm256_packs_epi32(v[2], v[3]);
        // Packing works in halves: put their quarters back into order.
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        const __m256i added = _mm256_maddubs_epi16(_mm256_set1_epi8(Int8Dynamic::kOffset), packed);
        const __m256i both = _mm256_add_epi16(added, _mm256_shuffle_epi32(added, 0xB1));
        _mm256_store_si256(reinterpret_cast<__m256i*>(codes), packed);
        _mm256_store_si256(reinterpret_cast<__m256i*>(corrections), _mm256_sub_epi16(_mm256_setzero_si256(), both));
        for (int j = 0; j < 4 * kLanes; j += kCodeRun, runs += kCodeRunBytes) {
            std::memcpy(runs, codes + j, kCodeRun);
            std::memcpy(runs + kCodeRun, corrections + j / 4, kCodeRunBytes - kCodeRun);
        }
    }
}

// a [m, lda] as codes of k inputs, a multiple of kCodeGroup: what lies beyond lda is zero. Ends with a barrier.
inline CodedRows quantize(Team& team, int64_t m, int64_t k, const float* a, int64_t lda, const Codes& room) {
    const int64_t groups = k / kCodeGroup;
    team.each(m, kQuantizeGrain, [&](int64_t r) {
        int8_t* runs = room.runs + r * CodedRows{nullptr, nullptr, groups}.ld();
        for (int64_t g = 0; g < groups; g++, runs += kCodeGroup / kCodeRun * kCodeRunBytes) {
            const int64_t first = g * kCodeGroup, there = std::min<int64_t>(kCodeGroup, lda - first);
            const float* x = a + r * lda + first;
            float padded[kCodeGroup];
            if (there < kCodeGroup) {
                std::fill(std::copy(x, x + there, padded), padded + kCodeGroup, 0.0f);
                x = padded;
            }
            quantize_group(x, runs, room.scales + r * groups + g);
        }
    });
    return {room.runs, room.scales, groups};
}

inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Four bytes in every lane.
inline __m256i splat4(const int8_t* bytes) {
    int32_t four;
    std::memcpy(&four, bytes, sizeof four);
    return _mm256_set1_epi32(four);
}

// c [R, 16] = or += x [R, k] · w, w being one panel.
template <int R>
inline void integer_tile(const CodedRows& x, const uint8_t* w, float* c, int64_t ldc, Into into, Channels channels) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int64_t ld = x.ld(), half = x.groups * kCodeGroup * kLanes;
    const int8_t* at = x.runs;
    Vec sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < x.groups; g++) {
        __m256i acc[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
        for (int i = 0; i < kCodeGroup / kCodeRun; i++, at += kCodeRunBytes, w += kCodeRun * kLanes) {
            const __m256i weights[2][2] = {{load32(w), load32(w + 4 * kLanes)},
                                           {load32(w + half), load32(w + half + 4 * kLanes)}};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const int8_t* run = at + r * ld;
                const __m256i low = splat4(run), high = splat4(run + 4), correction = splat4(run + kCodeRun);
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                    // Sums wrap around in 16 bit on their way; the last is at most 4 × 63 × 127 and thus right.
                    __m256i four = _mm256_add_epi16(correction, _mm256_maddubs_epi16(weights[j][0], low));
                    four = _mm256_add_epi16(four, _mm256_maddubs_epi16(weights[j][1], high));
                    acc[r][j] = _mm256_add_epi32(acc[r][j], _mm256_madd_epi16(four, ones));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Vec scale = splat(x.scales[r * x.groups + g]);
            sums[r][0] = fma(_mm256_cvtepi32_ps(acc[r][0]), scale, sums[r][0]);
            sums[r][1] = fma(_mm256_cvtepi32_ps(acc[r][1]), scale, sums[r][1]);
        }
    }
    for (int r = 0; r < R; r++) {
        channels.put(sums[r][0], 0, c + r * ldc, into);
        channels.put(sums[r][1], kLanes, c + r * ldc + kLanes, into);
    }
}

// Columns of one panel for any number of rows, in tiles of nearly equal height.
inline void integer_panel(const Matrix& w, int64_t panel, int64_t rows, const CodedRows& x, float* c, int64_t ldc,
                          Into into) {
    const uint8_t* b = static_cast<const uint8_t*>(w.panels) + panel * w.k * kPanel;
    const Channels channels = w.channels(panel, true);
    const int64_t tiles = (rows + kCodeRows - 1) / kCodeRows;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = rows * t / tiles, stop = rows * (t + 1) / tiles;
        const CodedRows part = x.from(first);
        float* out = c + first * ldc;
        switch (stop - first) {
            case 1: integer_tile<1>(part, b, out, ldc, into, channels); break;
            case 2: integer_tile<2>(part, b, out, ldc, into, channels); break;
            case 3: integer_tile<3>(part, b, out, ldc, into, channels); break;
            default: integer_tile<4>(part, b, out, ldc, into, channels); break;
        }
    }
}

}  // namespace hortator
