// Waiting for a counter that another thread or process raises: some microseconds of spinning, then the kernel.
//
// std::atomic::wait sleeps on futexes of one process, so that those here are called by hand.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace hortator {

constexpr int64_t kLine = 64;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    asm volatile("yield");
#endif
}

inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Number of something done so far, modulo 2^32; readers may sleep until it is reached. Lies in shared memory, where
// zeros are its first state.
struct alignas(kLine) Counter {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> waiting{0};  // who died asleep stays counted: that costs a call of the kernel, no more

    bool reached(uint32_t number) const { return int32_t(value.load(std::memory_order_acquire) - number) >= 0; }

    void raise(uint32_t to) {
        value.store(to, std::memory_order_release);
        // The value must be out before `waiting` is read, as a sleeper counts itself before it reads the value.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (waiting.load(std::memory_order_relaxed)) wake();
    }

    void wake() { syscall(SYS_futex, address(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

    // Until `number` is reached, `stop()` says so, or `limit_s` has passed; `stop` is asked every 50 ms at least.
    // True: reached.
    template <class Stop>
    bool wait(uint32_t number, double spin_s, double limit_s, Stop stop) {
        if (reached(number)) return true;
        const double start = seconds();
        for (double passed = 0; passed < spin_s; passed = seconds() - start) {
            for (int i = 0; i < 32; i++) {
                if (reached(number)) return true;
                relax();
            }
            // Who is waited for may be on this very core.
            if (passed > kAlone_s) sched_yield();
        }
        waiting.fetch_add(1, std::memory_order_seq_cst);
        bool here = false;
        for (;;) {
            const uint32_t seen = value.load(std::memory_order_seq_cst);
            if ((here = int32_t(seen - number) >= 0)) break;
            const double left_s = limit_s - (seconds() - start);
            if (stop() || left_s <= 0) break;
            sleep_while(seen, std::min(left_s, kSlice_s));
        }
        waiting.fetch_sub(1, std::memory_order_relaxed);
        return here || reached(number);
    }

  private:
    static constexpr double kSlice_s = 0.05, kAlone_s = 3e-6;

    uint32_t* address() { return reinterpret_cast<uint32_t*>(&value); }

    void sleep_while(uint32_t seen, double limit_s) {
        const timespec limit{time_t(limit_s), long((limit_s - double(time_t(limit_s))) * 1e9)};
        syscall(SYS_futex, address(), FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
};

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace hortator
