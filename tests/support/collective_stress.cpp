// Random messages between ranks that are threads, to be run under a sanitizer: `stress <seed> <rounds>`.
//
// All ranks get one mapping of the group's memory, so that the sanitizer sees that they meet there.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace {
std::mutex mapped_mutex;
std::map<int, void*> mapped;

void* map_once(void* at, size_t bytes, int access, int flags, int fd, off_t from) {
    if (fd < 0) return mmap(at, bytes, access, flags, fd, from);
    std::lock_guard lock(mapped_mutex);
    void*& place = mapped[fd];
    if (!place) place = mmap(at, bytes, access, flags, fd, from);
    return place;
}
int unmap_unshared(void* at, size_t bytes) {
    std::lock_guard lock(mapped_mutex);
    for (auto& [fd, place] : mapped) {
        if (place == at) return 0;
    }
    return munmap(at, bytes);
}
}  // namespace
#define mmap map_once
#define munmap unmap_unshared
#include "group.h"
#undef mmap
#undef munmap

using namespace hortator;

namespace {

float part_of(int64_t rank, int64_t message, int64_t i) { return float((rank * 7 + message * 3 + i) % 64); }

// What all ranks do alike is drawn from `plan`; how late each is, from its own numbers.
bool play(Group& group, int64_t rank, int64_t size, const std::vector<int64_t>& algorithms, uint32_t seed) {
    std::mt19937 plan(seed), own(seed * 64 + uint32_t(rank));
    std::deque<std::pair<int64_t, int64_t>> flying;  // message, floats
    bool right = true;
    const auto land = [&] {
        const auto [message, floats] = flying.front();
        flying.pop_front();
        Landed landed;
        if (!group.land(landed)) return false;
        for (int64_t i = 0; i < floats; i += 1 + floats / 40) {
            float total = 0, expected = 0;
            for (int64_t p = 0; p < landed.parts; p++) total += landed.part[p][i];
            for (int64_t r = 0; r < size; r++) expected += part_of(r, message, i);
            right &= total == expected;
        }
        group.release();
        return true;
    };
    for (int64_t message = 0; message < 60; message++) {
        const int64_t floats = 1 + int64_t(plan() % (plan() % 4 ? 300 : 9000));
        const size_t ahead = plan() % 5;
        const int64_t limit = int64_t(1) << 40, algorithm = algorithms[plan() % algorithms.size()];
        group.set_table(&limit, &algorithm, 1);
        float* const room = group.room(floats, Kind::kSum);
        for (int64_t i = 0; i < floats; i++) room[i] = part_of(rank, message, i);
        if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
        group.begin();
        flying.push_back({message, floats});
        while (flying.size() > ahead) {
            if (!land()) return false;
        }
        if (own() % 16 == 0 && group.check()) return false;
    }
    while (!flying.empty()) {
        if (!land()) return false;
    }
    return right;
}

bool round_of(int64_t size, bool memory, bool links, bool lose, uint32_t seed) {
    constexpr int64_t kMost = 1 << 16;
    const int fd = memory ? memfd_create("stress", 0) : -1;
    if (memory && ftruncate(fd, region_bytes(size, kMost))) std::abort();
    std::vector<std::vector<int32_t>> sockets(size, std::vector<int32_t>(size, -1));
    for (int64_t a = 0; links && a < size; a++) {
        for (int64_t b = 0; b < a; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) std::abort();
            sockets[a][b] = pair[0];
            sockets[b][a] = pair[1];
        }
    }
    std::vector<int64_t> algorithms;
    for (int64_t a = 0; a < kAlgorithms; a++) {
        if (a < int64_t(Algorithm::kDirect) ? memory : links) algorithms.push_back(a);
    }
    std::atomic<int64_t> well{0};
    std::vector<std::thread> ranks;
    for (int64_t r = 0; r < size; r++) {
        ranks.emplace_back([&, r] {
            Group group({r, size, fd, links ? sockets[r].data() : nullptr, kMost, seed % 2 * 20e-6, 20, nullptr, 0});
            std::thread ender;
            if (lose && r == 0) {
                ender = std::thread([&] {
                    std::this_thread::sleep_for(std::chrono::microseconds(seed % 7 * 300));
                    group.loss().declare("enough");
                });
            }
            const bool done = play(group, r, size, algorithms, seed);
            if (ender.joinable()) ender.join();
            well += done || lose;
            if (!done && !lose) std::printf("rank %ld: %s\n", long(r), group.loss().reason().c_str());
        });
    }
    for (auto& rank : ranks) rank.join();
    if (memory) {
        std::lock_guard lock(mapped_mutex);
        void* const at = mapped[fd];
        mapped.erase(fd);
        munmap(at, region_bytes(size, kMost));
        close(fd);
    }
    return well == size;
}

}  // namespace

int main(int, char** arguments) {
    const uint32_t seed = uint32_t(std::atoi(arguments[1])), rounds = uint32_t(std::atoi(arguments[2]));
    for (uint32_t i = 0; i < rounds; i++) {
        for (int kind = 1; kind < 4; kind++) {
            if (!round_of(2 + i % 3, kind & 1, kind & 2, i % 4 == 3, seed + i)) {
                std::printf("failed: seed %u, kind %d\n", seed + i, kind);
                return 1;
            }
        }
    }
    std::printf("clean\n");
}
