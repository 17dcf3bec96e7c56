// How weights and activations are stored. `../../formats.py` mirrors the enum and is the reference for int8.
#pragma once
#include <cstdint>

namespace hortator {

enum Format : int64_t { kFloat32, kFloat16, kInt8, kInt8Dynamic };

// A weight of 16 bit.
struct Half {
    uint16_t bits;
};

// Codes of weights quantised per output channel: weight = code · scale of its channel, |code| <= kTop.
struct Int8 {
    static constexpr int kTop = 127;
    int8_t code;
};

// The same with activations quantised as well, so that products are those of integers. 7 bits: four products of
// such a weight and an 8-bit activation fit into 16 bits. Stored kOffset higher, as the instruction that
// multiplies bytes wants one side unsigned.
struct Int8Dynamic {
    static constexpr int kTop = 63, kOffset = 64;
    uint8_t raised;
};

template <class W>
constexpr bool is_int8 = sizeof(W) == 1;

// Calls `work` with an (unusable) pointer to the type of weights that `format` names.
template <class Work>
inline void with_weights(Format format, Work work) {
    switch (format) {
        case kFloat32: return work(static_cast<float*>(nullptr));
        case kFloat16: return work(static_cast<Half*>(nullptr));
        case kInt8: return work(static_cast<Int8*>(nullptr));
        case kInt8Dynamic: return work(static_cast<Int8Dynamic*>(nullptr));
    }
}

}  // namespace hortator
