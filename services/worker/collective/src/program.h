// What one rank does with a message that goes over links, as a list: sending and receiving, one after the other.
//
// A rank keeps one buffer of a message: its own part, which becomes the sum. Each piece that arrives belongs to the
// first step that still waits for its sender. A piece that replaces floats comes only after this rank has sent all
// that it gives of the message, so that it may be read straight to its place.
#pragma once
#include <cstdint>
#include <vector>

#include "exchange.h"
#include "sums.h"

namespace hortator {

// `../library.py` names them in this order.
enum class Algorithm : int64_t { kOneShot, kTwoShot, kDirect, kRing, kTree, kScatter };
constexpr int64_t kAlgorithms = 6;

struct Step {
    enum Do {
        kSend,    // the range to `peer`
        kAdd,     // a piece of `peer` to the range
        kAddAll,  // a piece of every peer to the range, in rank order
        kTake,    // a piece of `peer` instead of the range
        kKeep,    // all of `peer`'s part, beside this rank's own
    } what;
    int64_t peer;
    Range range;
};

// Every part to every rank, which adds them itself: one hop, the most bytes.
inline void direct(std::vector<Step>& steps, int64_t rank, int64_t size, const Range& all) {
    for (int64_t i = 1; i < size; i++) steps.push_back({Step::kSend, (rank + i) % size, all});
    for (int64_t r = 0; r < size; r++) {
        if (r != rank) steps.push_back({Step::kKeep, r, all});
    }
}

// Shares travel round, each once to be added up and once more to be known: the fewest bytes, 2 (size - 1) hops. A
// share is added in the order of the ring, from the rank of its number on.
inline void ring(std::vector<Step>& steps, int64_t rank, int64_t size, const Range& all) {
    const int64_t right = (rank + 1) % size, left = (rank + size - 1) % size;
    const auto share = [&](int64_t r) { return share_of(all.count, (r % size + size) % size, size); };
    for (int64_t i = 0; i < size - 1; i++) {
        steps.push_back({Step::kSend, right, share(rank - i)});
        steps.push_back({Step::kAdd, left, share(rank - i - 1)});
    }
    for (int64_t i = 0; i < size - 1; i++) {
        steps.push_back({Step::kSend, right, share(rank + 1 - i)});
        steps.push_back({Step::kTake, left, share(rank - i)});
    }
}

// Up a binary tree and down again: 2 log2(size) hops. A rank adds its first child's sum, then its second's.
inline void tree(std::vector<Step>& steps, int64_t rank, int64_t size, const Range& all) {
    const int64_t child = 2 * rank + 1, stop = std::min(child + 2, size), parent = (rank - 1) / 2;
    for (int64_t r = child; r < stop; r++) steps.push_back({Step::kAdd, r, all});
    if (rank) {
        steps.push_back({Step::kSend, parent, all});
        steps.push_back({Step::kTake, parent, all});
    }
    for (int64_t r = child; r < stop; r++) steps.push_back({Step::kSend, r, all});
}

// Each rank adds up its share and tells all: two hops, as few bytes as a ring where every pair has its own link.
inline void scatter(std::vector<Step>& steps, int64_t rank, int64_t size, const Range& all) {
    const Range own = share_of(all.count, rank, size);
    for (int64_t i = 1; i < size; i++) {
        const int64_t r = (rank + i) % size;
        steps.push_back({Step::kSend, r, share_of(all.count, r, size)});
    }
    steps.push_back({Step::kAddAll, 0, own});
    for (int64_t i = 1; i < size; i++) steps.push_back({Step::kSend, (rank + i) % size, own});
    for (int64_t i = 1; i < size; i++) {
        const int64_t r = (rank + i) % size;
        steps.push_back({Step::kTake, r, share_of(all.count, r, size)});
    }
}

inline void plan(std::vector<Step>& steps, Algorithm algorithm, int64_t rank, int64_t size, int64_t floats) {
    steps.clear();
    const Range all{0, floats};
    switch (algorithm) {
        case Algorithm::kRing: return ring(steps, rank, size, all);
        case Algorithm::kTree: return tree(steps, rank, size, all);
        case Algorithm::kScatter: return scatter(steps, rank, size, all);
        default: return direct(steps, rank, size, all);
    }
}

}  // namespace hortator
