// What a rank finds out about its slice of a row of logits. `../../sharded_sampling_looks.py` has the reference.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "draw.h"
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

struct Offer {
    int64_t at, count;  // candidates on every rank
    double mass;        // of the whole row; used where top-p is the only filter
    float top;          // its largest
};

struct Verdict {
    int32_t token;
    float value;
    bool proved;
};

// e^x of values up to 0; 0 below -700. Every step is rounded as written, so all CPUs give the same bits.
inline double exp_alike(double x) {
    if (x < -700.0) return 0.0;
    const double n = std::rint(x * 1.4426950408889634);
    const double r = std::fma(n, -1.90821492927058770002e-10, std::fma(n, -6.93147180369123816490e-01, x));
    constexpr double kFactorial[] = {6227020800., 479001600., 39916800., 3628800., 362880., 40320., 5040.,
                                     720.,        120.,       24.,       6.,       2.,      1.,     1.};
    double result = 0.0;
    for (const double f : kFactorial) result = std::fma(result, r, 1.0 / f);
    return std::ldexp(result, int(n));
}

// Deciding a filtered draw by the candidates of `ranks`; `decide` in sharded_sampling_merge.py says how.
class Judge {
  public:
    Judge(const Candidate* listed, int64_t ranks, int64_t stride, const int64_t* owns, int64_t vocab)
        : listed_(listed), ranks_(ranks), stride_(stride), owns_(owns), vocab_(vocab) {}

    Verdict decide(const Offer& row, const Draw& d) {
        collect(row, float(d.temperature));
        const int64_t sent = int64_t(all_.size()), k = 0 < d.top_k && d.top_k < vocab_ ? d.top_k : vocab_;
        const float floor = d.min_p > 0.0 ? float(std::log(d.min_p)) : kDeepest;
        const bool only_top_p = k == vocab_ && d.min_p <= 0.0;
        int64_t left = 0;
        while (left < std::min(sent, k) && all_[left].scaled() >= floor) left++;
        double total = 0.0;
        for (int64_t i = 0; i < left; i++) total += all_[i].weight;
        const double wanted = d.top_p * (only_top_p ? row.mass : total);
        int64_t kept = left;
        bool reached = left == k;
        if (d.top_p < 1.0) {
            double mass = 0.0;
            for (kept = 0; kept < left && (kept == 0 || mass < wanted);) mass += all_[kept++].weight;
            if (only_top_p) reached = mass >= wanted;
        }
        const float border = all_[(only_top_p ? kept : left) - 1].scaled();
        const bool proved = (reached && complete(row, d, border)) || ends_above(floor);
        const Item found = draw(kept, d.uniform);
        return {found.id(), found.value, proved};
    }

  private:
    struct Item {
        uint64_t key;  // bits of -scaled, which order like it, then the id
        float value;
        double weight;
        float scaled() const { return -std::bit_cast<float>(uint32_t(key >> 32)); }
        int32_t id() const { return int32_t(key & 0xFFFFFFFF); }
    };
    struct Rank {
        bool more;  // it has values that it did not send
        float last, last_scaled;
    };

    void collect(const Offer& row, float temperature) {
        all_.clear();
        rank_.clear();
        for (int64_t r = 0; r < ranks_; r++) {
            Rank rank{owns_[r] > row.count, kDeepest, kDeepest};
            for (int64_t i = 0; i < row.count; i++) {
                const Candidate& c = listed_[r * stride_ + row.at + i];
                if (c.id < 0) break;
                const float scaled = (c.value - row.top) / temperature;
                rank.last = c.value, rank.last_scaled = scaled;
                const uint64_t key = uint64_t(std::bit_cast<uint32_t>(std::abs(scaled))) << 32 | uint32_t(c.id);
                all_.push_back({key, c.value, exp_alike(scaled)});
            }
            rank_.push_back(rank);
        }
        std::sort(all_.begin(), all_.end(), [](const Item& a, const Item& b) { return a.key < b.key; });
    }

    // No rank held back what min-p would keep.
    bool ends_above(float floor) const {
        auto holds_back_less = [&](const Rank& r) { return !r.more || r.last_scaled < floor; };
        return std::all_of(rank_.begin(), rank_.end(), holds_back_less);
    }

    // No value that a rank held back comes before the candidates that end with `border`.
    bool complete(const Offer& row, const Draw& d, float border) const {
        for (int64_t r = 0; r < ranks_; r++) {
            const Rank& rank = rank_[r];
            if (!rank.more || rank.last_scaled < border) continue;
            // What it held back may be equal to its last, then it has higher ids than those sent; but scaling
            // may have made others equal, in no order of ids.
            const float under = (std::nextafter(rank.last, kDeepest) - row.top) / float(d.temperature);
            if (rank.last_scaled > border || !(under < border)) return false;
            for (int64_t i = 0; i < row.count; i++) {
                const float value = listed_[r * stride_ + row.at + i].value;
                if (value != rank.last && (value - row.top) / float(d.temperature) == border) return false;
            }
        }
        return true;
    }

    // By inverse CDF over ascending ids, of the first `kept`.
    Item draw(int64_t kept, double uniform) {
        std::sort(all_.begin(), all_.begin() + kept, [](const Item& a, const Item& b) { return a.id() < b.id(); });
        double mass = 0.0, reached = 0.0;
        for (int64_t i = 0; i < kept; i++) mass += all_[i].weight;
        const double target = uniform * mass;
        Item found = all_[0];
        for (int64_t i = 0; i < kept; i++) {
            if (all_[i].weight == 0.0) continue;
            found = all_[i];
            if ((reached += found.weight) > target) break;
        }
        return found;
    }

    const Candidate* const listed_;
    const int64_t ranks_, stride_;
    const int64_t* const owns_;
    const int64_t vocab_;
    std::vector<Item> all_;
    std::vector<Rank> rank_;
};

}  // namespace hortator

extern "C" {

// verdicts[i] of offers[i] with draws[i], from candidates [ranks, stride].
void hortator_decide(hortator::Team* team, const hortator::Candidate* listed, int64_t ranks, int64_t stride,
                     const int64_t* owns, const hortator::Offer* offers, const hortator::Draw* draws, int64_t count,
                     int64_t vocab, hortator::Verdict* verdicts) {
    team->run([&](int) {
        hortator::Judge judge(listed, ranks, stride, owns, vocab);
        team->each(count, [&](int64_t i) { verdicts[i] = judge.decide(offers[i], draws[i]); });
    });
}

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
