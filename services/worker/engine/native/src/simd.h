// Eight float lanes, conversions from the stored formats, and the exponential every kernel shares.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "formats.h"

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "the native kernels need AVX2, FMA and F16C"
#endif

namespace hortator {

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const Int8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void store(Half* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec splat(float v) { return _mm256_set1_ps(v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline float to_float(float v) { return v; }
inline float to_float(Half v) { return _cvtsh_ss(v.bits); }
inline void from_float(float v, float* p) { *p = v; }
inline void from_float(float v, Half* p) { p->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }

// Sums and maxima of the lanes, always paired in the same order.
inline float sum(Vec v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(Vec v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// e^x to 2 ulp; exactly 0 below -87.3 (also for -infinity), NaN stays NaN. Range reduction by ln 2 in two
// parts, then the degree-6 polynomial of Cephes' expf.
inline Vec exp(Vec x) {
    const Vec low = splat(-87.3f);
    const Vec vanishes = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    // Operand order: min and max return the second operand when one is NaN.
    const Vec in = _mm256_min_ps(splat(88.7f), _mm256_max_ps(low, x));
    const Vec n = _mm256_round_ps(_mm256_mul_ps(in, splat(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
    Vec r = fma(n, splat(-0.693359375f), in);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, splat(1.0f)));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(vanishes, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

// Rows of eight lanes become columns.
inline void transpose8(Vec v[8]) {
    Vec a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

}  // namespace hortator
