// Memory for floats straight from the system: zeros, and only what is touched costs anything.
#pragma once
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace hortator {

class Pages {
  public:
    explicit Pages(int64_t floats) : bytes_(sizeof(float) * size_t(floats)) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* const at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory for messages");
        floats_ = static_cast<float*>(at);
    }
    ~Pages() { munmap(floats_, bytes_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    float* get() const { return floats_; }
    bool has(const float* at) const { return at >= floats_ && at < floats_ + bytes_ / sizeof(float); }

  private:
    const size_t bytes_;
    float* floats_;
};

}  // namespace hortator
