// A fixed crew of threads that works on one pass together: shared loops, scratch memory.
//
// Not OpenMP, for two reasons a machine with few cores shows: its idle threads spin for milliseconds, which
// starves the other services; and its barriers wait for every thread, also for one that has nothing left to do
// but was not given a core. Here a loop is over when its work is done, whoever did it: a member that comes late
// finds the loops finished and catches up. A waiting member spins for some microseconds, then sleeps.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace hortator {

// Waits until `word` is no longer `old`.
template <class Word>
inline void wait_while(const std::atomic<Word>& word, Word old, std::chrono::microseconds spin) {
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
    // Throws what std::thread throws where the system grants no more of them.
    explicit Team(int size) : size_(size), scratch_(size + 1) {
        try {
            for (int i = 1; i < size_; i++) members_.emplace_back([this, i] { serve(i); });
        } catch (...) {
            end();
            throw;
        }
    }
    ~Team() { end(); }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Every member that gets a core in time, the caller as number 0, runs work(member). All members must call
    // the same loops in the same order; nothing outside of loops may have effects, except for number 0.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        base_ = finished_.load(std::memory_order_relaxed);
        open_run();
        at_loop() = base_;
        work(0);
        // No member may enter any more, and those inside must leave before `work` goes away.
        run_.fetch_or(kClosed, std::memory_order_acq_rel);
        for (uint64_t run; (run = run_.load(std::memory_order_acquire)) & kInside;) wait_while(run_, run, kBusySpin);
    }

    // From inside run(): body(i) once for every i below count, by whoever comes first; returns when all are done.
    template <class Body>
    void each(int64_t count, Body body) {
        if (count <= 0) return;
        const uint32_t loop = ++at_loop();
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (ticket >> 32 == loop && int64_t(ticket & 0xFFFFFFFF) < count) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            body(int64_t(ticket & 0xFFFFFFFF));
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) finish(loop);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        for (uint32_t f; int32_t((f = finished_.load(std::memory_order_acquire)) - loop) < 0;) {
            wait_while(finished_, f, kBusySpin);
        }
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

    // The same for all members together: to be asked for before run(), by the caller.
    float* shared(int64_t floats) { return scratch(size_, floats); }

  private:
    // run_: number of the run << 32 | closed to members | members inside it, other than the caller.
    static constexpr uint64_t kClosed = uint64_t(1) << 31, kInside = kClosed - 1;

    // Number of the loop this thread is at; a thread is in one run at a time.
    static uint32_t& at_loop() {
        static thread_local uint32_t loop = 0;
        return loop;
    }

    void end() {
        stopping_.store(true);
        open_run();
        for (auto& member : members_) member.join();
    }

    void open_run() {
        const uint64_t number = (run_.load(std::memory_order_relaxed) >> 32) + 1;
        run_.store(number << 32, std::memory_order_release);
        called_.store(uint32_t(number), std::memory_order_release);
        called_.notify_all();
    }

    void serve(int member) {
        for (uint32_t seen = 0;;) {
            wait_while(called_, seen, kIdleSpin);
            seen = called_.load(std::memory_order_acquire);
            if (stopping_.load()) return;
            if (!enter(seen)) continue;
            at_loop() = base_;
            (*work_)(member);
            run_.fetch_sub(1, std::memory_order_acq_rel);
            run_.notify_all();
        }
    }

    bool enter(uint32_t number) {
        uint64_t run = run_.load(std::memory_order_acquire);
        do {
            if (run >> 32 != number || run & kClosed) return false;
        } while (!run_.compare_exchange_weak(run, run + 1, std::memory_order_acq_rel));
        return true;
    }

    // By whoever did the last of the loop's work; the ticket of the next one opens it.
    void finish(uint32_t loop) {
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(uint64_t(loop + 1) << 32, std::memory_order_release);
        finished_.store(loop, std::memory_order_release);
        finished_.notify_all();
    }

    // Between passes others want the core; within one, the slowest member is rarely farther behind.
    static constexpr std::chrono::microseconds kIdleSpin{20}, kBusySpin{100};

    const int size_;
    const std::function<void(int)>* work_ = nullptr;
    uint32_t base_ = 0;
    std::vector<std::vector<float>> scratch_;  // of each member, and of all together
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> called_{0};
    alignas(64) std::atomic<uint64_t> run_{kClosed};
    alignas(64) std::atomic<uint32_t> finished_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint64_t> ticket_{uint64_t(1) << 32};
    std::vector<std::thread> members_;
};

}  // namespace hortator
