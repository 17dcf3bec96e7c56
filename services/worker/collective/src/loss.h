// Whether the group is lost, and why: said once, never taken back.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace hortator {

class Loss {
  public:
    bool lost() const { return lost_.load(std::memory_order_acquire); }

    // From any thread; the first reason stays. Whoever waits for something of the group is woken. `told`: by another
    // rank, which tells all of them.
    void declare(const std::string& reason, bool told = false) {
        std::vector<std::function<void()>> heard;
        {
            std::lock_guard lock(mutex_);
            if (lost()) return;
            reason_ = reason;
            told_ = told;
            lost_.store(true, std::memory_order_release);
            heard = heard_;
        }
        for (const auto& call : heard) call();
    }

    std::string reason() const {
        std::lock_guard lock(mutex_);
        return reason_;
    }

    bool told() const {
        std::lock_guard lock(mutex_);
        return told_;
    }

    // `call` is called once the group is lost. Before anything can lose it.
    void on_loss(std::function<void()> call) { heard_.push_back(std::move(call)); }

  private:
    mutable std::mutex mutex_;
    std::atomic<bool> lost_{false};
    std::string reason_;
    bool told_ = false;
    std::vector<std::function<void()>> heard_;
};

}  // namespace hortator
