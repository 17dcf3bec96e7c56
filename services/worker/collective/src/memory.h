// Messages through memory that all ranks map: a rank's parts lie where every other rank reads them.
//
// Each rank has room for its parts. As all ranks make the same calls, a message lies at the same place of every rank's
// room, and nobody has to be told where. Three counters of each rank say how far it has come: messages
// written, added up (its share of them), and released. Everything is zero in a fresh region; nothing of it has a
// name in a file system, so that nothing is left behind by ranks that die.
#pragma once
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "exchange.h"
#include "loss.h"
#include "rooms.h"
#include "sums.h"
#include "wait.h"

namespace hortator {

// The start of a message in a rank's room: what must be the same on all ranks.
struct alignas(kLine) Stamp {
    uint32_t number, shape;
    int64_t floats;
    double begun_s;  // ranks that share memory share a clock
};
constexpr int64_t kStampFloats = sizeof(Stamp) / sizeof(float);
static_assert(kStampFloats == kUnit);

struct RankState {
    Counter written, added, released;
    alignas(kLine) std::atomic<int32_t> process;  // 0: not here yet
    std::atomic<uint32_t> left;
};

struct Header {
    alignas(kLine) std::atomic<int64_t> size, most_floats;  // by whoever comes first; the same for all
    alignas(kLine) std::atomic<uint32_t> lost;              // 1: the reason is being written; 2: it can be read
    char reason[256];
    RankState rank[kMostRanks];
};

inline int64_t region_bytes(int64_t size, int64_t most_floats) {
    return int64_t(sizeof(Header)) + size * Rooms::floats(most_floats) * int64_t(sizeof(float));
}

class Memory {
  public:
    struct Message {
        uint32_t number;
        int64_t offset, floats;
    };

    // Throws std::exception with what is wrong with the region.
    Memory(int fd, int64_t rank, int64_t size, int64_t most_floats, double spin_s, double limit_s, Loss& loss)
        : rank_(rank), size_(size), room_(Rooms::floats(most_floats)), bytes_(region_bytes(size, most_floats)),
          spin_s_(spin_s), limit_s_(limit_s), loss_(loss), places_(most_floats) {
        watched_.fill(-1);
        struct stat facts;
        if (fstat(fd, &facts)) throw std::system_error(errno, std::generic_category(), "the group's memory");
        if (facts.st_size < bytes_) {
            throw std::runtime_error("the group's memory has " + std::to_string(facts.st_size) + " bytes where " +
                                     std::to_string(bytes_) + " are needed: make it for the same size and floats");
        }
        void* const at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mapping the group's memory");
        header_ = static_cast<Header*>(at);
        rooms_ = reinterpret_cast<float*>(header_ + 1);
        if (!agreed(header_->size, size) || !agreed(header_->most_floats, most_floats)) {
            munmap(at, bytes_);
            throw std::runtime_error("the ranks do not agree on the group's size or the floats in flight");
        }
        me().process.store(getpid(), std::memory_order_release);
        loss_.on_loss([this] { spread(loss_.reason()); });
    }

    ~Memory() {
        me().left.store(1, std::memory_order_release);
        wake_all();
        for (int fd : watched_) {
            if (fd >= 0) close(fd);
        }
        munmap(header_, bytes_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void set_limit(double limit_s) { limit_s_ = limit_s; }

    // Where this rank's part of the next message is to be written; null: the group is lost.
    float* room(int64_t floats, Message& message) {
        const Rooms::Place place = places_.next(floats, next_);
        if (place.offset < 0) {
            loss_.declare("rank " + std::to_string(rank_) + " has more in flight than it said it would");
            return nullptr;
        }
        for (int64_t r = 0; place.used && r < size_; r++) {
            if (!reached(&RankState::released, place.before, r, "has not read an earlier message")) return nullptr;
        }
        message = {next_++, place.offset, floats};
        return part(rank_, message);
    }

    // `shape`: whatever else must be the same on all ranks.
    void begin(const Message& message, uint32_t shape, double begun_s) {
        *stamp(rank_, message) = {message.number, shape, message.floats, begun_s};
        me().written.raise(message.number + 1);
    }

    // Every rank's part as it is.
    bool land_parts(const Message& message, uint32_t shape, Landed& landed) {
        for (int64_t r = 0; r < size_; r++) {
            if (!reached(&RankState::written, message.number + 1, r, "has not sent its part") ||
                !alike(message, shape, r)) {
                return false;
            }
            landed.part[r] = part(r, message);
        }
        landed.parts = size_;
        return true;
    }

    // The sum, as one part: every rank adds up its share, then collects those of the others.
    bool land_sum(const Message& message, uint32_t shape, Landed& landed) {
        if (!land_parts(message, shape, landed)) return false;
        float* const own = part(rank_, message);
        add_parts(own, landed.part, size_, share_of(message.floats, rank_, size_));
        me().added.raise(message.number + 1);
        for (int64_t i = 1; i < size_; i++) {
            const int64_t r = (rank_ + i) % size_;
            if (!reached(&RankState::added, message.number + 1, r, "has not added its share")) return false;
            const Range share = share_of(message.floats, r, size_);
            std::memcpy(own + share.first, landed.part[r] + share.first, sizeof(float) * share.count);
        }
        landed.parts = 1;
        landed.part[0] = own;
        return true;
    }

    // Since the last rank began it, of a message that has landed; negative if that was this rank.
    double took_s(const Message& message) {
        double last = 0;
        for (int64_t r = 0; r < size_; r++) last = std::max(last, stamp(r, message)->begun_s);
        return last == stamp(rank_, message)->begun_s ? -1 : seconds() - last;
    }

    void release(const Message& message) {
        places_.released(message.number + 1);
        me().released.raise(message.number + 1);
    }

    // Whether some rank is known to have ended, or to have said that the group is lost. From any thread.
    bool look_after() {
        std::lock_guard lock(watching_);
        if (header_->lost.load(std::memory_order_acquire)) {
            const bool said = header_->lost.load(std::memory_order_acquire) == 2;
            loss_.declare(said ? header_->reason : "another rank gave up", true);
        }
        for (int64_t r = 0; r < size_ && !loss_.lost(); r++) {
            if (ended(r)) loss_.declare("rank " + std::to_string(r) + " has ended");
        }
        return loss_.lost();
    }

  private:
    RankState& me() { return header_->rank[rank_]; }
    float* room_of(int64_t rank) { return rooms_ + rank * room_; }
    float* part(int64_t rank, const Message& message) { return room_of(rank) + message.offset + kStampFloats; }
    Stamp* stamp(int64_t rank, const Message& message) {
        return reinterpret_cast<Stamp*>(room_of(rank) + message.offset);
    }

    static bool agreed(std::atomic<int64_t>& shared, int64_t mine) {
        int64_t found = 0;
        return shared.compare_exchange_strong(found, mine) || found == mine;
    }

    bool reached(Counter RankState::* counter, uint32_t number, int64_t rank, const char* fault) {
        Counter& awaited = header_->rank[rank].*counter;
        if (loss_.lost()) return false;
        if (awaited.reached(number)) return true;
        const auto stop = [&] {
            if (look_after()) return true;
            if (!header_->rank[rank].left.load(std::memory_order_acquire)) return false;
            // It may have come this far just before it left.
            if (!awaited.reached(number)) loss_.declare("rank " + std::to_string(rank) + " has left the group");
            return true;
        };
        if (awaited.wait(number, spin_s_, limit_s_, stop)) return !loss_.lost();
        loss_.declare("rank " + std::to_string(rank) + " " + fault + " within " + std::to_string(limit_s_) + " s");
        return false;
    }

    bool alike(const Message& message, uint32_t shape, int64_t rank) {
        const Stamp& theirs = *stamp(rank, message);
        if (theirs.number == message.number && theirs.shape == shape && theirs.floats == message.floats) return true;
        loss_.declare("rank " + std::to_string(rank) + " sends another message than rank " + std::to_string(rank_) +
                      " (" + std::to_string(theirs.floats) + " floats where " + std::to_string(message.floats) +
                      " were due): the ranks are out of step");
        return false;
    }

    // Whether the process of `rank` is gone. Ranks may share one process, as in tests.
    bool ended(int64_t rank) {
        const int32_t process = header_->rank[rank].process.load(std::memory_order_acquire);
        if (!process || process == getpid()) return false;
        int& watched = watched_[rank];
        if (watched == -1) {
            watched = int(syscall(SYS_pidfd_open, process, 0));
            if (watched < 0) watched = -2;  // no such system call, or another namespace: sockets must tell
            if (watched < 0 && errno == ESRCH) return !header_->rank[rank].left.load(std::memory_order_acquire);
        }
        pollfd state{watched, POLLIN, 0};
        return watched >= 0 && poll(&state, 1, 0) > 0 && !header_->rank[rank].left.load(std::memory_order_acquire);
    }

    void spread(const std::string& reason) {
        uint32_t none = 0;
        if (header_->lost.compare_exchange_strong(none, 1)) {
            std::strncpy(header_->reason, reason.c_str(), sizeof header_->reason - 1);
            header_->lost.store(2, std::memory_order_release);
        }
        wake_all();
    }

    void wake_all() {
        for (int64_t r = 0; r < size_; r++) {
            RankState& state = header_->rank[r];
            for (Counter* counter : {&state.written, &state.added, &state.released}) counter->wake();
        }
    }

    const int64_t rank_, size_, room_, bytes_;
    const double spin_s_;
    double limit_s_;
    Loss& loss_;
    Header* header_;
    float* rooms_;
    Rooms places_;
    uint32_t next_ = 0;
    std::mutex watching_;
    std::array<int, kMostRanks> watched_;  // of the ranks' processes; -1: not yet, -2: cannot be
};

}  // namespace hortator
