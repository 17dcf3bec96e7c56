// Where a rank's messages lie, one after the other: found from the rank's own calls alone, so that all ranks, which
// make the same calls, find the same.
#pragma once
#include <array>
#include <cstdint>

#include "sums.h"

namespace hortator {

constexpr int64_t kMostMessages = 256;  // of one rank, whose room may still be in use

class Rooms {
  public:
    // `before` messages must have been released, by all who read there, before the place may be written.
    struct Place {
        int64_t offset;  // -1: too much is in flight
        bool used;
        uint32_t before;
    };

    explicit Rooms(int64_t most_floats) : large_{kWarmFloats, large_floats(most_floats), 0} {}

    // Floats to place messages in, of which `most_floats` are in flight at once.
    static int64_t floats(int64_t most_floats) { return kWarmFloats + large_floats(most_floats); }
    static int64_t extent(int64_t floats) { return round_up(floats) + kApart; }

    // For message `number`, one more than the last. What had to be waited for is free from then on.
    Place next(int64_t floats, uint32_t number) {
        const int64_t extent = Rooms::extent(floats);
        // With nothing in flight two places are enough: one is read while the other is written.
        if (released_ == number && large_.head >= 2 * extent) large_.head = 0;
        Ring& ring = extent <= warm_.floats && !mine_in(warm_, extent) ? warm_ : large_;
        const int64_t offset = ring.first + ring.next(extent);
        ring.head = offset - ring.first + extent;
        // Messages are released in order: what was there last being free, all before it is.
        int64_t done = count_;
        while (done && !overlap(held(done - 1), offset, extent)) done--;
        if (!done && count_ == kMostMessages) done = 1;
        Place place{offset, done > 0, 0};
        if (done) {
            place.before = held(done - 1).number + 1;
            if (int32_t(released_ - place.before) < 0) place.offset = -1;
            first_ = (first_ + done) % kMostMessages;
            count_ -= done;
        }
        held_[(first_ + count_++) % kMostMessages] = {number, offset, extent};
        return place;
    }

    // This rank has released all messages before `number`.
    void released(uint32_t number) { released_ = number; }

  private:
    struct Held {
        uint32_t number;
        int64_t offset, extent;
    };
    struct Ring {
        int64_t first, floats, head;
        int64_t next(int64_t extent) const { return head + extent > floats ? 0 : head; }
    };

    // For what a transport writes before a message; and no two messages meet in a cache line.
    static constexpr int64_t kApart = 2 * kUnit;
    // Of the ring that messages go round in as long as they fit: little, so that it stays in the cache.
    static constexpr int64_t kWarmFloats = 32768;
    // Of the ring for all else. Twice what may be in flight: messages are whole, and one that does not fit at the
    // end starts over at the beginning.
    static int64_t large_floats(int64_t most_floats) {
        return 2 * (round_up(most_floats) + kMostMessages * (extent(1) - 1));
    }

    const Held& held(int64_t i) const { return held_[(first_ + i) % kMostMessages]; }
    static bool overlap(const Held& h, int64_t offset, int64_t extent) {
        return h.offset < offset + extent && offset < h.offset + h.extent;
    }
    // Whether something this rank has not released lies where the ring's next message would.
    bool mine_in(const Ring& ring, int64_t extent) const {
        for (int64_t i = count_; i-- && int32_t(held(i).number - released_) >= 0;) {
            if (overlap(held(i), ring.first + ring.next(extent), extent)) return true;
        }
        return false;
    }

    Ring warm_{0, kWarmFloats, 0}, large_;
    uint32_t released_ = 0;
    std::array<Held, kMostMessages> held_;  // what may still be read by someone, oldest first
    int64_t first_ = 0, count_ = 0;
};

}  // namespace hortator
