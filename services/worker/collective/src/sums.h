// Cutting a message into the ranks' shares, and adding; the compiler vectorises the loops.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "exchange.h"

namespace hortator {

constexpr int64_t kUnit = 16;  // floats of a cache line: no two ranks' shares meet within one

inline int64_t round_up(int64_t floats) { return (floats + kUnit - 1) / kUnit * kUnit; }

struct Range {
    int64_t first, count;
};

// The floats that `rank` adds up where the work is shared; empty for some ranks of very short messages.
inline Range share_of(int64_t floats, int64_t rank, int64_t size) {
    const int64_t units = (floats + kUnit - 1) / kUnit;
    const int64_t first = std::min(floats, units * rank / size * kUnit);
    return {first, std::min(floats, units * (rank + 1) / size * kUnit) - first};
}

// to += from. Of two floats the order does not matter.
inline void add(float* __restrict to, const float* __restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// to = from, for another core to read. What is longer goes past the cache: taking back lines that the other core
// holds costs up to twice as much, or not, from one run to the next. `to` is aligned to a cache line.
inline void hand_over(float* to, const float* from, int64_t floats) {
    int64_t done = 0;
#if defined(__SSE__)
    constexpr int64_t kShort = 4096, kLanes = 4;
    if (floats > kShort) {
        for (; done + kLanes <= floats; done += kLanes) _mm_stream_ps(to + done, _mm_loadu_ps(from + done));
        _mm_sfence();
    }
#endif
    std::memcpy(to + done, from + done, sizeof(float) * (floats - done));
}

// to = part[0] + part[1] + … of the range, in this order. `to` may be one of the parts: an element is read from all
// of them before it is written.
inline void add_parts(float* to, const float* const* part, int64_t parts, const Range& range) {
    constexpr int64_t kBlock = 64;
    for (int64_t at = range.first, stop = at + range.count; at < stop; at += kBlock) {
        const int64_t count = std::min(kBlock, stop - at);
        float total[kBlock];
        std::memcpy(total, part[0] + at, sizeof(float) * count);
        for (int64_t p = 1; p < parts; p++) add(total, part[p] + at, count);
        std::memcpy(to + at, total, sizeof(float) * count);
    }
}

// What landed becomes `values`, which is part `own` of it as this rank gave it.
inline void complete(float* values, Landed landed, int64_t own, int64_t floats) {
    if (landed.parts == 1) {
        std::memcpy(values, landed.part[0], sizeof(float) * floats);
    } else if (landed.parts == 2) {  // what most groups are
        add(values, landed.part[1 - own], floats);
    } else {
        landed.part[own] = values;
        add_parts(values, landed.part, landed.parts, {0, floats});
    }
}

}  // namespace hortator
