// What a rank finds out about its slice of a row of logits. `../../sharded_sampling_looks.py` has the reference.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "team.h"

namespace hortator {

struct Look {
    int64_t row;
    double temperature;  // 0: no sum
    int64_t count, at;   // candidates, and the place of the first
};

enum State : int32_t { kNoNumber, kInfinite, kFinite };

struct Found {
    float value;  // the largest
    int32_t id;   // the first that has it
    double sum;   // of exp((v - value) / temperature)
    int32_t state;
    float raw;
};

struct Candidate {
    float value;
    int32_t id;
};

// The best `count` of a row by value, equal ones by lower index, found in one pass: whatever is not above the
// worst of those that were best when the memory last ran full cannot belong to them.
class Best {
  public:
    void find(const float* row, int64_t size, int64_t count) {
        keys_.clear();
        count_ = size_t(count);
        most_ = std::max<size_t>(4 * count_, 64);
        worst_ = std::numeric_limits<float>::quiet_NaN();  // compares as if everything were above it
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
            unsigned hits = _mm256_movemask_ps(_mm256_cmp_ps(load(row + i), splat(worst_), _CMP_NLE_UQ));
            for (; hits; hits &= hits - 1) add(row, i + std::countr_zero(hits));
        }
        for (; i < size; i++) {
            if (!(row[i] <= worst_)) add(row, i);
        }
        keep_best();
        std::sort(keys_.begin(), keys_.end());
    }

    int64_t size() const { return int64_t(keys_.size()); }
    int32_t index(int64_t i) const { return int32_t(keys_[i] & 0xFFFFFFFF); }

  private:
    void add(const float* row, int64_t i) {
        const auto bits = std::bit_cast<uint32_t>(row[i] + 0.0f);  // -0 becomes 0, which it equals
        // Bits of negative floats order the other way round; the largest comes first.
        const uint32_t order = bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
        keys_.push_back(uint64_t(order) << 32 | uint64_t(i));
        if (keys_.size() < most_) return;
        keep_best();
        worst_ = row[index(int64_t(count_) - 1)];
    }

    void keep_best() {
        if (keys_.size() <= count_) return;
        std::nth_element(keys_.begin(), keys_.begin() + int64_t(count_) - 1, keys_.end());
        keys_.resize(count_);
    }

    size_t count_ = 0, most_ = 0;
    float worst_ = 0.0f;
    std::vector<uint64_t> keys_;
};

// Sum of exp((v - top) / temperature); few additions in float, so it is exact enough.
inline double likelihoods(const float* row, int64_t size, float top, float temperature) {
    constexpr int64_t kStretch = 256;
    const Vec most = splat(top), divisor = splat(temperature);
    auto weigh = [&](Vec v) { return exp(_mm256_div_ps(_mm256_sub_ps(v, most), divisor)); };
    const int64_t whole = size / kLanes * kLanes;
    double total = 0.0;
    for (int64_t begin = 0; begin < whole; begin += kStretch) {
        Vec sums = _mm256_setzero_ps();
        const int64_t stop = std::min(whole, begin + kStretch);
        for (int64_t i = begin; i < stop; i += kLanes) sums = _mm256_add_ps(sums, weigh(load(row + i)));
        total += sum(sums);
    }
    if (whole < size) {
        float rest[kLanes];
        std::fill(rest, rest + kLanes, -std::numeric_limits<float>::infinity());
        std::copy(row + whole, row + size, rest);
        total += sum(weigh(load(rest)));
    }
    return total;
}

inline Found look(const float* row, int64_t size, int64_t first, double temperature) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    Vec most = splat(kLowest), zero = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Vec v = load(row + i);
        most = _mm256_max_ps(most, v);
        zero = fma(v, _mm256_setzero_ps(), zero);  // NaN as soon as one value is not finite
    }
    float top = largest(most), rest = sum(zero);
    for (; i < size; i++) {
        top = std::max(top, row[i]);
        rest += row[i] * 0.0f;
    }
    Found found{kLowest, int32_t(first), 0.0, kFinite, kLowest};
    if (rest != 0.0f) {
        const bool numbers = std::none_of(row, row + size, [](float v) { return std::isnan(v); });
        found.state = numbers ? kInfinite : kNoNumber;
        if (!numbers) return found;
    }
    found.value = found.raw = top;
    found.id = int32_t(first + (std::find(row, row + size, top) - row));
    if (temperature > 0.0 && std::isfinite(top)) found.sum = likelihoods(row, size, top, float(temperature));
    return found;
}

}  // namespace hortator

extern "C" {

// found[i] of looks[i] at values [rows, ld], of which `size` are logits, the first of id `first`; and candidates.
void hortator_look(hortator::Team* team, const float* values, int64_t size, int64_t ld, int64_t first,
                   const hortator::Look* looks, int64_t count, hortator::Found* found,
                   hortator::Candidate* candidates) {
    using namespace hortator;
    team->run([&](int) {
        Best best;
        team->each(count, [&](int64_t l) {
            const Look& asked = looks[l];
            const float* row = values + asked.row * ld;
            found[l] = look(row, size, first, asked.temperature);
            int64_t listed = 0;
            if (asked.count > 0 && found[l].state != kNoNumber) {
                best.find(row, size, std::min(asked.count, size));
                for (; listed < best.size(); listed++) {
                    const int32_t i = best.index(listed);
                    candidates[asked.at + listed] = {row[i], int32_t(first + i)};
                }
            }
            for (; listed < asked.count; listed++) {
                candidates[asked.at + listed] = {-std::numeric_limits<float>::infinity(), -1};
            }
        });
    });
}

}  // extern "C"
