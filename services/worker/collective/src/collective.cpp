// The functions `../native.py` calls. A group is opened and closed by one thread; what else it does may be called
// by one thread at a time, except for losing it and asking why.
#include <cstdio>

#include "group.h"

using namespace hortator;

extern "C" {

int64_t hortator_region_bytes(int64_t size, int64_t most_floats) { return region_bytes(size, most_floats); }

// Null, with the reason in `fault`, if it cannot be opened.
Group* hortator_open(const Setup* setup, char* fault, int64_t room) {
    try {
        return new Group(*setup);
    } catch (const std::exception& error) {
        std::snprintf(fault, size_t(room), "%s", error.what());
        return nullptr;
    }
}

void hortator_close(Group* group) { delete group; }

void hortator_exchange(Group* group, Exchange* to) { *to = group->exchange(); }

// These are 0 once the group is lost.
int32_t hortator_all_reduce(Group* group, float* values, int64_t floats) { return group->all_reduce(values, floats); }

int32_t hortator_gather(Group* group, const uint8_t* mine, int64_t bytes, uint8_t* to) {
    return group->gather(mine, bytes, to);
}

int32_t hortator_check(Group* group) { return !group->check(); }

void hortator_table(Group* group, const int64_t* bytes, const int64_t* algorithm, int64_t count) {
    group->set_table(bytes, algorithm, count);
}

void hortator_limit(Group* group, double limit_s) { group->set_limit(limit_s); }

void hortator_counts(Group* group, Count* to, int32_t anew) { group->read_counts(to, anew); }

// took_s[repeats]
int32_t hortator_time(Group* group, int64_t algorithm, int64_t floats, int64_t repeats, double* took_s) {
    return group->time(Algorithm(algorithm), floats, repeats, took_s);
}

double hortator_busy(Group* group) { return group->busy_s(); }

void hortator_lose(Group* group, const char* reason) { group->loss().declare(reason); }

void hortator_reason(Group* group, char* reason, int64_t room) {
    std::snprintf(reason, size_t(room), "%s", group->loss().reason().c_str());
}

}  // extern "C"
