// Memory for pieces that arrive before anybody can use them; kept and used again.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace hortator {

class Inbox {
  public:
    ~Inbox() {
        for (auto& buffers : free_) {
            for (float* buffer : buffers) std::free(buffer);
        }
    }

    float* take(int64_t floats) {
        const int kind = kind_of(floats);
        std::lock_guard lock(mutex_);
        if (free_[kind].empty()) {
            return static_cast<float*>(std::aligned_alloc(64, sizeof(float) << kind));
        }
        float* const buffer = free_[kind].back();
        free_[kind].pop_back();
        return buffer;
    }

    void give_back(float* buffer, int64_t floats) {
        std::lock_guard lock(mutex_);
        free_[kind_of(floats)].push_back(buffer);
    }

  private:
    // Powers of two, and some room for readers that load whole vectors.
    static int kind_of(int64_t floats) { return std::bit_width(uint64_t(floats + 31)); }

    std::mutex mutex_;
    std::array<std::vector<float*>, 64> free_;
};

}  // namespace hortator
