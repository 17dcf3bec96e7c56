// A fixed crew of threads that works on one pass together: shared loops, barriers, scratch memory.
//
// Not OpenMP: its idle threads spin for milliseconds, which starves the other services of a machine with few
// cores. Here a waiting member spins for some microseconds, then sleeps in the kernel.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace hortator {

// Waits until `word` is no longer `old`.
inline void wait_while(const std::atomic<uint32_t>& word, uint32_t old, std::chrono::microseconds spin) {
    const auto stop = std::chrono::steady_clock::now() + spin;
    do {
        for (int i = 0; i < 64; i++) {
            if (word.load(std::memory_order_acquire) != old) return;
            _mm_pause();
        }
    } while (std::chrono::steady_clock::now() < stop);
    word.wait(old, std::memory_order_acquire);
}

class Team {
  public:
    explicit Team(int size) : size_(size), scratch_(size) {
        for (int i = 1; i < size_; i++) members_.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        work_ = nullptr;
        call();
        for (auto& member : members_) member.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Every member, the caller as number 0, runs work(member).
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        call();
        work(0);
        barrier();
    }

    // From inside run(), by all members: body(i) once for every i below count, then a barrier.
    template <class Body>
    void each(int64_t count, Body body) {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
        barrier();
    }

    // The same in stretches of `grain`: for bodies too small to be handed out one by one.
    template <class Body>
    void each(int64_t count, int64_t grain, Body body) {
        each((count + grain - 1) / grain, [&](int64_t part) {
            const int64_t stop = std::min(count, (part + 1) * grain);
            for (int64_t i = part * grain; i < stop; i++) body(i);
        });
    }

    // Aligned memory of this member, at least `floats` long; kept between runs, contents undefined.
    float* scratch(int member, int64_t floats) {
        auto& memory = scratch_[member];
        if (int64_t(memory.size()) < floats + 16) memory.resize(floats + 16);
        const auto address = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<float*>((address + 63) / 64 * 64);
    }

  private:
    void call() {
        called_.fetch_add(1, std::memory_order_release);
        called_.notify_all();
    }

    void serve(int member) {
        for (uint32_t seen = 0;; seen++) {
            wait_while(called_, seen, kIdleSpin);
            if (!work_) return;
            (*work_)(member);
            barrier();
        }
    }

    void barrier() {
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
        } else {
            wait_while(round_, round, kBusySpin);
        }
    }

    // Between passes others want the core; within one, the slowest member is rarely farther behind.
    static constexpr std::chrono::microseconds kIdleSpin{20}, kBusySpin{100};

    const int size_;
    const std::function<void(int)>* work_ = nullptr;
    std::vector<std::vector<float>> scratch_;
    alignas(64) std::atomic<uint32_t> called_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::vector<std::thread> members_;
};

}  // namespace hortator
