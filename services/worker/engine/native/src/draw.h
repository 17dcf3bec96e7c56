// Drawing the next token of a row. `../../sampler.py` has the rules and is the reference.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace hortator {

// How one row is drawn.
struct Draw {
    int64_t row, largest;  // of the logits, and the id of its largest
    int64_t top_k;         // 0: all
    double top_p, min_p, uniform;
    double temperature;    // above 0
};

constexpr int64_t kShare = 256;    // ids summed as one where the whole vocabulary is drawn from
constexpr int kBuckets = 512;      // likelihoods told apart before any are sorted
constexpr float kUnlikely = 88.0f;  // e^-88 vanishes
// How far below the largest logit candidates are looked for, until enough are found.
constexpr float kDepths[] = {6.0f, 12.0f, 24.0f, std::numeric_limits<float>::infinity()};
constexpr float kDeepest = -std::numeric_limits<float>::infinity();

// Draws from rows of `size` logits, one after the other, in `scratch` of floats(size).
class Drawer {
  public:
    Drawer(int64_t size, float* scratch)
        : size_(size), padded_(padded(size)), below_(scratch), weight_(scratch + padded_), share_(padded_ / kShare) {
        std::fill(below_ + size_, below_ + padded_, kDeepest);
    }
    static int64_t floats(int64_t size) { return 2 * padded(size); }

    // The token of logits [size], all finite or -infinity.
    int64_t draw(const float* logits, const Draw& d) {
        weigh(logits, logits[d.largest], float(d.temperature));
        const bool some = 0 < d.top_k && d.top_k < size_;
        if (!some && d.top_p >= 1.0 && d.min_p <= 0.0) return from_all(d.uniform);
        const float floor = d.min_p > 0.0 ? float(std::log(d.min_p)) : kDeepest;
        find_candidates(floor, some ? d.top_k : 0, d.top_p);
        if (some && int64_t(candidates_.size()) > d.top_k) {
            keep_best([](int64_t) { return 1.0; }, double(d.top_k));
        }
        if (d.top_p < 1.0) {
            const bool whole = !some && d.min_p <= 0.0;
            keep_best([&](int64_t i) { return double(weight_[i]); }, d.top_p * (whole ? total_ : mass()));
        }
        return from_candidates(d.uniform);
    }

  private:
    static int64_t padded(int64_t size) { return (size + kShare - 1) / kShare * kShare; }

    // Distances to the largest, and what they weigh. Sums of a share need few additions, so they are exact enough.
    void weigh(const float* logits, float top, float temperature) {
        for (int64_t i = 0; i < size_; i++) below_[i] = (logits[i] - top) / temperature;
        total_ = 0.0;
        for (int64_t s = 0; s < int64_t(share_.size()); s++) {
            Vec sums = _mm256_setzero_ps();
            for (int64_t i = s * kShare; i < (s + 1) * kShare; i += kLanes) {
                const Vec w = exp(load(below_ + i));
                store(weight_ + i, w);
                sums = _mm256_add_ps(sums, w);
            }
            total_ += share_[s] = sum(sums);
        }
    }

    // Ids, ascending, among which are all that the filters will keep.
    void find_candidates(float floor, int64_t top_k, double top_p) {
        for (const float depth : kDepths) {
            const float least = std::max(floor, -depth);
            resolution_ = kBuckets / std::clamp(-least, 1.0f, kUnlikely);
            candidates_.clear();
            for (int64_t i = 0; i < padded_; i += kLanes) {
                unsigned hits = _mm256_movemask_ps(_mm256_cmp_ps(load(below_ + i), splat(least), _CMP_GE_OQ));
                for (; hits; hits &= hits - 1) candidates_.push_back(int32_t(i + std::countr_zero(hits)));
            }
            while (!candidates_.empty() && candidates_.back() >= size_) candidates_.pop_back();
            if (-depth <= floor) return;
            if (top_k ? int64_t(candidates_.size()) >= top_k : floor == kDeepest && mass() >= top_p * total_) return;
        }
    }

    double mass() const {
        double result = 0.0;
        for (const int32_t i : candidates_) result += weight_[i];
        return result;
    }

    // Leaves of the candidates the shortest run of the most likely whose amounts reach `wanted`, but at least one;
    // lower ids first among equals.
    template <class Amount>
    void keep_best(Amount amount, double wanted) {
        wanted = std::max(wanted, std::numeric_limits<double>::min());
        double filled[kBuckets] = {};
        for (const int32_t i : candidates_) filled[bucket(i)] += amount(i);
        int last = 0;
        double before = 0.0;
        while (last + 1 < kBuckets && before + filled[last] < wanted) before += filled[last++];
        border_.clear();
        for (const int32_t i : candidates_) {
            if (bucket(i) == last) border_.push_back(i);
        }
        auto likelier = [&](int32_t a, int32_t b) { return below_[a] != below_[b] ? below_[a] > below_[b] : a < b; };
        std::sort(border_.begin(), border_.end(), likelier);
        size_t inside = 0;
        while (inside < border_.size() && before < wanted) before += amount(border_[inside++]);
        if (inside == border_.size()) {
            std::erase_if(candidates_, [&](int32_t i) { return bucket(i) > last; });
            return;
        }
        const int32_t first_out = border_[inside];
        std::erase_if(candidates_, [&](int32_t i) { return !likelier(i, first_out); });
    }

    int bucket(int64_t i) const {
        return int(std::min(-below_[i] * resolution_, kBuckets - 1.0f));
    }

    // The first id whose cumulative weight exceeds the share `u` of the total; one that has any weight.
    int64_t from_candidates(double u) const {
        const double target = u * mass();
        double reached = 0.0;
        int64_t found = candidates_.front();
        for (const int32_t i : candidates_) {
            if (weight_[i] == 0.0f) continue;
            found = i;
            if ((reached += weight_[i]) > target) break;
        }
        return found;
    }

    int64_t from_all(double u) const {
        const double target = u * total_;
        double before = 0.0;
        int64_t s = 0, last = int64_t(share_.size()) - 1;
        for (; s < last && before + share_[s] <= target; s++) before += share_[s];
        // Rounding may lead past the last share that has any weight.
        while (s > 0 && share_[s] == 0.0) s--;
        double inside = 0.0;
        for (int64_t i = 0; i < kShare; i++) inside += weight_[s * kShare + i];
        const double within = std::min((target - before) / share_[s], 1.0) * inside;
        double reached = 0.0;
        int64_t found = s * kShare;
        for (int64_t i = s * kShare; i < (s + 1) * kShare; i++) {
            if (weight_[i] == 0.0f) continue;
            found = i;
            if ((reached += weight_[i]) > within) break;
        }
        return found;
    }

    const int64_t size_, padded_;
    double total_ = 0.0;
    float resolution_ = 0.0f;  // buckets for each unit of distance
    float *const below_, *const weight_;
    std::vector<double> share_;
    std::vector<int32_t> candidates_, border_;
};

}  // namespace hortator
