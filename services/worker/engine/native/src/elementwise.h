// What happens to a token between the matrix products.
#pragma once
#include <cmath>

#include "simd.h"

namespace hortator {

// out = x / rms(x) · weight over `size` elements, a multiple of 8. out may be x.
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
    Vec squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const Vec inverse = splat(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    for (int64_t i = 0; i < size; i += kLanes) {
        store(out + i, _mm256_mul_ps(load(weight + i), _mm256_mul_ps(load(x + i), inverse)));
    }
}

// Rotate one head in place: dimension i is paired with i + size / 2. cos and sin [size / 2].
inline void rotate(float* head, const float* cos, const float* sin, int64_t size) {
    for (int64_t i = 0; i < size / 2; i += kLanes) {
        const Vec a = load(head + i), b = load(head + size / 2 + i), c = load(cos + i), s = load(sin + i);
        store(head + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        store(head + size / 2 + i, fma(b, c, _mm256_mul_ps(a, s)));
    }
}

template <class T>
inline void write_head(const float* head, int64_t size, T* page) {
    for (int64_t i = 0; i < size; i += kLanes) store(page + i, load(head + i));
}

}  // namespace hortator
