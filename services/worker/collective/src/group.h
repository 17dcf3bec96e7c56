// One rank's end of a group: messages in their order, each by the algorithm that suits its size.
#pragma once
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "exchange.h"
#include "links.h"
#include "loss.h"
#include "memory.h"
#include "pages.h"
#include "program.h"
#include "sums.h"
#include "wait.h"

namespace hortator {

constexpr int64_t kSizeClasses = 40;

// What one algorithm carried. `fastest_s[c]`: the least time from another rank's begin, the last, to landed of a message of 2^c … 2^(c+1) - 1
// bytes since this was last begun anew, or infinity.
struct Count {
    int64_t messages, bytes;
    double exposed_s;  // waited for in land
    double fastest_s[kSizeClasses];
};

struct Setup {
    int64_t rank, size;
    int64_t memory;       // file descriptor, or -1
    const int32_t* peer;  // a connected socket to each rank, but for this one; or null
    int64_t most_floats;
    double spin_s, limit_s;
    const int32_t* core;  // that the links' threads run on; none: anywhere
    int64_t cores;
};

class Group {
  public:
    explicit Group(const Setup& setup) : setup_(setup), nowhere_(round_up(setup.most_floats) + kUnit) {
        if (setup.memory >= 0) {
            memory_ = std::make_unique<Memory>(int(setup.memory), setup.rank, setup.size, setup.most_floats,
                                               setup.spin_s, setup.limit_s, loss_);
        }
        if (setup.peer) {
            links_ = std::make_unique<Links>(std::vector<int>(setup.peer, setup.peer + setup.size), setup.rank,
                                             setup.most_floats,
                                             std::vector<int>(setup.core, setup.core + setup.cores), setup.spin_s,
                                             setup.limit_s, loss_);
        }
        forget_fastest();
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
        flight = {algorithm, uint32_t(algorithm) << 1 | uint32_t(kind), floats, {}, 0};
        float* const room = linked(algorithm) ? links_->room(floats, flight.number)
                                              : memory_->room(floats, flight.message);
        if (!room) return nowhere_.get();
        next_++;
        return room;
    }

    void begin() {
        if (loss_.lost()) return;
        Flight& flight = at(next_ - 1);
        if (linked(flight.algorithm)) {
            links_->begin(flight.number, flight.algorithm, flight.shape);
        } else {
            memory_->begin(flight.message, flight.shape, seconds());
        }
    }

    bool land(Landed& landed) {
        landed.parts = 0;
        if (loss_.lost()) return false;
        const Flight& flight = at(landing_++);
        const double start = seconds();
        double took_s = 0;
        const bool here = linked(flight.algorithm) ? links_->land(flight.number, landed, took_s)
                          : flight.algorithm == Algorithm::kTwoShot
                              ? memory_->land_sum(flight.message, flight.shape, landed)
                              : memory_->land_parts(flight.message, flight.shape, landed);
        if (!here) {
            landed.parts = 0;
            return false;
        }
        const double stop = seconds();
        if (!linked(flight.algorithm)) took_s = memory_->took_s(flight.message);
        count(flight, stop - start, took_s);
        return true;
    }

    void release() {
        if (loss_.lost()) return;
        const Flight& flight = at(oldest_++);
        if (linked(flight.algorithm)) {
            links_->release(flight.number);
        } else {
            memory_->release(flight.message);
        }
    }

    // False: the group is lost.
    bool all_reduce(float* values, int64_t floats) {
        const Algorithm algorithm = choose(floats, Kind::kSum);
        for (int64_t done = 0; done < floats;) {
            const int64_t now = std::min(floats - done, setup_.most_floats);
            hand_over(room(now, Kind::kSum, algorithm), values + done, now);
            begin();
            Landed landed;
            if (!land(landed)) return false;
            complete(values + done, landed, setup_.rank, now);
            release();
            done += now;
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

    // Seconds of each of `repeats` sums by `algorithm`: a mean of kAlike in a row, adding included. Single ones tell
    // little, as a rank that comes late finds all parts waiting.
    bool time(Algorithm algorithm, int64_t floats, int64_t repeats, double* took_s) {
        std::vector<float> values(floats);
        float nothing = 0;
        if (!all_reduce(&nothing, 1)) return false;  // that nobody starts before the others are here
        for (int64_t i = 0; i < repeats; i++) {
            const double start = seconds();
            double wrote_s = 0;
            for (int64_t k = 0; k < kAlike; k++) {
                const double before = seconds();
                std::fill_n(room(floats, Kind::kSum, algorithm), floats, 1.0f);
                wrote_s += seconds() - before;
                begin();
                Landed landed;
                if (!land(landed)) return false;
                complete(values.data(), landed, setup_.rank, floats);
                release();
            }
            took_s[i] = (seconds() - start - wrote_s) / kAlike;
        }
        return true;
    }

    // Seconds in which something was under way on the links.
    double busy_s() { return links_ ? links_->busy_s() : 0; }

    // Sums of at most `bytes[i]` go by `algorithm[i]`, longer ones by the last.
    void set_table(const int64_t* bytes, const int64_t* algorithm, int64_t count) {
        table_.clear();
        for (int64_t i = 0; i < count; i++) table_.push_back({bytes[i], Algorithm(algorithm[i])});
    }

    // How long to wait, from now on, for a rank that lives but does not come.
    void set_limit(double limit_s) {
        if (memory_) memory_->set_limit(limit_s);
        if (links_) links_->set_limit(limit_s);
    }

    // What all messages so far cost; `fastest_s` starts anew if so wished.
    void read_counts(Count* to, bool anew) {
        std::copy(counts_.begin(), counts_.end(), to);
        if (anew) forget_fastest();
    }

    Loss& loss() { return loss_; }

    // Lost, whether known before or found by looking.
    bool check() { return loss_.lost() || (memory_ && memory_->look_after()); }

  private:
    struct Flight {
        Algorithm algorithm;
        uint32_t shape;
        int64_t floats;
        Memory::Message message;
        uint32_t number;  // on the links
    };
    struct Choice {
        int64_t bytes;
        Algorithm algorithm;
    };

    static constexpr int64_t kAlike = 8;

    static Group& of(void* self) { return *static_cast<Group*>(self); }
    Flight& at(uint64_t number) { return flights_[number % kMostMessages]; }

    Algorithm choose(int64_t floats, Kind kind) const {
        if (kind == Kind::kGather || table_.empty()) return memory_ ? Algorithm::kOneShot : Algorithm::kDirect;
        const int64_t bytes = floats * int64_t(sizeof(float));
        for (const Choice& choice : table_) {
            if (bytes <= choice.bytes) return choice.algorithm;
        }
        return table_.back().algorithm;
    }

    void forget_fastest() {
        for (Count& count : counts_) {
            std::fill_n(count.fastest_s, kSizeClasses, std::numeric_limits<double>::infinity());
        }
    }

    static bool linked(Algorithm algorithm) { return algorithm >= Algorithm::kDirect; }

    void count(const Flight& flight, double exposed_s, double took_s) {
        Count& count = counts_[int64_t(flight.algorithm)];
        const int64_t bytes = flight.floats * int64_t(sizeof(float));
        count.messages++;
        count.bytes += bytes;
        count.exposed_s += exposed_s;
        if (took_s < 0) return;
        double& fastest = count.fastest_s[63 - __builtin_clzll(uint64_t(bytes) | 1)];
        fastest = std::min(fastest, took_s);
    }

    const Setup setup_;
    Loss loss_;
    std::unique_ptr<Memory> memory_;
    std::unique_ptr<Links> links_;
    const Pages nowhere_;  // where parts are written once the group is lost
    std::vector<Choice> table_;
    std::array<Flight, kMostMessages> flights_;
    uint64_t next_ = 0, landing_ = 0, oldest_ = 0;
    std::array<Count, kAlgorithms> counts_{};
};

}  // namespace hortator
