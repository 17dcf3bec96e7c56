// One rank's end of a group: messages in their order, each by the algorithm that suits its size.
#pragma once
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "exchange.h"
#include "loss.h"
#include "memory.h"
#include "sums.h"
#include "wait.h"

namespace hortator {

// `../native.py` names them in this order.
enum class Algorithm : int64_t { kOneShot, kTwoShot, kDirect, kRing, kTree, kScatter };
constexpr int64_t kAlgorithms = 6, kSizeClasses = 40;

// What one algorithm carried. `fastest_s[c]`: the least time from begin to landed of a message of 2^c … 2^(c+1) - 1
// bytes since it was last read, or infinity.
struct Count {
    int64_t messages, bytes;
    double exposed_s;  // waited for in land
    double fastest_s[kSizeClasses];
};

struct Setup {
    int64_t rank, size;
    int64_t memory;  // file descriptor, or -1
    int64_t most_floats;
    double spin_s, limit_s;
};

class Group {
  public:
    explicit Group(const Setup& setup) : setup_(setup) {
        if (setup.memory >= 0) {
            memory_ = std::make_unique<Memory>(int(setup.memory), setup.rank, setup.size, setup.most_floats,
                                               setup.spin_s, setup.limit_s, loss_);
        }
        // Only touched once the group is lost: until then it is address space alone.
        const size_t bytes = sizeof(float) * (round_up(setup.most_floats) + kUnit);
        void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory of the group's messages");
        nowhere_ = {static_cast<float*>(at), [bytes](float* p) { munmap(p, bytes); }};
        read_counts(nullptr);
    }

    Exchange exchange() {
        return {this, setup_.rank, setup_.size, setup_.most_floats,
                [](void* self, int64_t floats, int64_t kind) { return of(self).room(floats, Kind(kind)); },
                [](void* self) { of(self).begin(); },
                [](void* self, Landed* landed) { of(self).land(*landed); },
                [](void* self) { of(self).release(); }};
    }

    float* room(int64_t floats, Kind kind) { return room(floats, kind, choose(floats, kind)); }

    float* room(int64_t floats, Kind kind, Algorithm algorithm) {
        if (floats > setup_.most_floats) {
            loss_.declare("a message of " + std::to_string(floats) + " floats where " +
                          std::to_string(setup_.most_floats) + " may be in flight");
        }
        if (next_ - oldest_ == kMostMessages) loss_.declare("too many messages in flight");
        if (loss_.lost()) return nowhere_.get();
        Flight& flight = at(next_);
        flight.algorithm = algorithm;
        flight.shape = uint32_t(flight.algorithm) << 1 | uint32_t(kind);
        float* const room = memory_->room(floats, flight.message);
        flight.whole = room;
        next_ += flight.whole;
        return room ? room : nowhere_.get();
    }

    void begin() {
        if (loss_.lost()) return;
        Flight& flight = at(next_ - 1);
        flight.begun_s = seconds();
        memory_->begin(flight.message, flight.shape);
    }

    bool land(Landed& landed) {
        landed.parts = 0;
        if (loss_.lost()) return false;
        Flight& flight = at(landing_++);
        const double start = seconds();
        const bool here = flight.algorithm == Algorithm::kTwoShot
                              ? memory_->land_sum(flight.message, flight.shape, landed)
                              : memory_->land_parts(flight.message, flight.shape, landed);
        if (!here) {
            landed.parts = 0;
            return false;
        }
        count(flight, start, seconds());
        return true;
    }

    void release() {
        if (loss_.lost()) return;
        memory_->release(at(oldest_++).message);
    }

    // False: the group is lost.
    bool all_reduce(float* values, int64_t floats) {
        const Algorithm algorithm = choose(floats, Kind::kSum);
        // Ranks that have a core each hand over pieces that stay in the cache.
        const bool pieces = algorithm == Algorithm::kOneShot && setup_.spin_s > 0;
        const int64_t piece = pieces ? std::min(kPieceFloats, setup_.most_floats / 2 + 1) : setup_.most_floats;
        const int64_t ahead = pieces ? 2 : 1;
        const auto size_at = [&](int64_t first) { return std::min(piece, floats - first); };
        for (int64_t sent = 0, landed = 0; landed < floats;) {
            for (; sent < floats && sent < landed + ahead * piece; sent += size_at(sent)) {
                hand_over(room(size_at(sent), Kind::kSum, algorithm), values + sent, size_at(sent));
                begin();
            }
            Landed parts;
            if (!land(parts)) return false;
            complete(values + landed, parts, setup_.rank, size_at(landed));
            release();
            landed += size_at(landed);
        }
        return !loss_.lost();
    }

    // to[size][bytes]
    bool gather(const uint8_t* mine, int64_t bytes, uint8_t* to) {
        const int64_t most = setup_.most_floats * int64_t(sizeof(float));
        for (int64_t done = 0; done < bytes;) {
            const int64_t now = std::min(bytes - done, most);
            std::memcpy(room((now + 3) / 4, Kind::kGather), mine + done, now);
            begin();
            Landed landed;
            if (!land(landed)) return false;
            for (int64_t r = 0; r < setup_.size; r++) std::memcpy(to + r * bytes + done, landed.part[r], now);
            release();
            done += now;
        }
        return !loss_.lost();
    }

    // Sums of at most `bytes[i]` go by `algorithm[i]`, longer ones by the last.
    void set_table(const int64_t* bytes, const int64_t* algorithm, int64_t count) {
        table_.clear();
        for (int64_t i = 0; i < count; i++) table_.push_back({bytes[i], Algorithm(algorithm[i])});
    }

    // What all messages so far cost; `fastest_s` starts anew.
    void read_counts(Count* to) {
        if (to) std::copy(counts_.begin(), counts_.end(), to);
        for (Count& count : counts_) std::fill(count.fastest_s, count.fastest_s + kSizeClasses, 1.0 / 0.0);
    }

    Loss& loss() { return loss_; }

    // Lost, whether known before or found by looking.
    bool check() { return loss_.lost() || (memory_ && memory_->look_after()); }

  private:
    struct Flight {
        Algorithm algorithm;
        uint32_t shape;
        bool whole;
        double begun_s;
        Memory::Message message;
    };
    struct Choice {
        int64_t bytes;
        Algorithm algorithm;
    };

    static constexpr int64_t kPieceFloats = 12288;

    static Group& of(void* self) { return *static_cast<Group*>(self); }
    Flight& at(uint64_t number) { return flights_[number % kMostMessages]; }

    Algorithm choose(int64_t floats, Kind kind) const {
        if (kind == Kind::kGather || table_.empty()) return Algorithm::kOneShot;
        const int64_t bytes = floats * int64_t(sizeof(float));
        for (const Choice& choice : table_) {
            if (bytes <= choice.bytes) return choice.algorithm;
        }
        return table_.back().algorithm;
    }

    void count(const Flight& flight, double start, double stop) {
        Count& count = counts_[int64_t(flight.algorithm)];
        const int64_t bytes = flight.message.floats * int64_t(sizeof(float));
        count.messages++;
        count.bytes += bytes;
        count.exposed_s += stop - start;
        double& fastest = count.fastest_s[63 - __builtin_clzll(uint64_t(bytes))];
        fastest = std::min(fastest, stop - flight.begun_s);
    }

    const Setup setup_;
    Loss loss_;
    std::unique_ptr<Memory> memory_;
    std::unique_ptr<float, std::function<void(float*)>> nowhere_;
    std::vector<Choice> table_;
    std::array<Flight, kMostMessages> flights_;
    uint64_t next_ = 0, landing_ = 0, oldest_ = 0;
    std::array<Count, kAlgorithms> counts_{};
};

}  // namespace hortator
