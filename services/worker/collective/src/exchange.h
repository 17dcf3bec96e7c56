// What a forward pass knows of its group: messages that are begun, travel while it computes, and land in order.
//
// A table of C functions, so that the pass and the transports are compiled apart and either may also be Python
// (`../abi.py` mirrors the structs). All calls come from one thread at a time, in the same order with the same
// sizes on every rank; a rank runs ahead of another only as far as the room for parts allows.
#pragma once
#include <cstdint>

namespace hortator {

constexpr int kMostRanks = 64;

// What a landed message brought: `parts` rows of its floats. A sum is complete when they are added in this order,
// starting from the first: the same bits on every rank. Parts of a gathering are those of rank 0, 1, … as they were.
struct Landed {
    int64_t parts;  // 0: the group is lost, and nothing more will land
    const float* part[kMostRanks];
};

enum class Kind : int64_t { kSum = 0, kGather = 1 };

struct Exchange {
    void* self;
    int64_t rank, size;
    int64_t most_floats;  // that may be in flight at once, not landed and released; more than one message never has
    // Where this rank's part of the next message is to be written, aligned to 64 bytes. Waits until there is room.
    // Never null: of a lost group the memory leads nowhere.
    float* (*room)(void* self, int64_t floats, int64_t kind);
    // The part is written; the message leaves.
    void (*begin)(void* self);
    // Waits for the oldest message that was begun and has not landed. Its parts stay until `release`.
    void (*land)(void* self, Landed* landed);
    void (*release)(void* self);
};

}  // namespace hortator
