// Messages over links to every other rank: pieces are added and passed on as they arrive, by the threads that
// receive them, so that a message travels while the caller computes.
#pragma once
#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "inbox.h"
#include "link.h"
#include "loss.h"
#include "pages.h"
#include "program.h"
#include "rooms.h"
#include "wait.h"

namespace hortator {

class Links {
  public:
    // Owns the sockets; -1 at this rank's own place. Throws std::exception.
    Links(const std::vector<int>& sockets, int64_t rank, int64_t most_floats, const std::vector<int>& cores,
          double spin_s, double limit_s, Loss& loss)
        : rank_(rank), size_(int64_t(sockets.size())), most_floats_(most_floats), spin_s_(spin_s), limit_s_(limit_s),
          loss_(loss), places_(most_floats), room_(Rooms::floats(most_floats)), flights_(kNumbers),
          held_(size_) {
        for (Flight& flight : flights_) flight.arrived.resize(size_);
        links_.resize(size_);
        for (int64_t r = 0; r < size_; r++) {
            if (r != rank_) links_[r] = std::make_unique<Link>(sockets[r], r, loss, cores);
        }
        loss_.on_loss([this] {
            const std::string reason = loss_.reason();
            if (!loss_.told()) each_link([&](Link& link) { link.give_up(reason); });
            wake_landing();
            wake_sent();
        });
        for (int64_t r = 0; r < size_; r++) {
            if (r == rank_) continue;
            links_[r]->start({[this, r](const Head& head) { return place(r, head); },
                              [this, r](const Head& head, float* data) { arrived(r, head, data); },
                              [this] { wake_landing(); }, [this] { wake_sent(); }});
        }
    }

    ~Links() {
        const bool lost = loss_.lost();
        const std::string reason = loss_.reason();
        each_link([&](Link& link) { lost ? link.give_up(reason) : link.leave(kGoodbye_s); });
        each_link([](Link& link) { link.stop(); });
        for (Flight& flight : flights_) {
            for (auto& pieces : flight.arrived) {
                for (const Arrived& piece : pieces) {
                    if (!room_.has(piece.data)) inbox_.give_back(piece.data, piece.head.count);
                }
            }
        }
    }
    Links(const Links&) = delete;
    Links& operator=(const Links&) = delete;

    // Where this rank's part of the next message is to be written; null: the group is lost.
    float* room(int64_t floats, uint32_t& number) {
        const Rooms::Place place = places_.next(floats, next_);
        if (place.offset < 0) {
            loss_.declare("rank " + std::to_string(rank_) + " has more in flight than it said it would");
            return nullptr;
        }
        while (place.used && int32_t(place.before - unsent_from_) > 0) {
            if (!all_sent(unsent_from_)) return nullptr;
            unsent_from_++;
        }
        number = next_++;
        Flight& flight = at(number);
        std::lock_guard lock(flight.mutex);
        flight.own = room_.get() + place.offset;
        flight.floats = floats;
        return flight.own;
    }

    void begin(uint32_t number, Algorithm algorithm, uint32_t shape) {
        Flight& flight = at(number);
        busy(+1);
        std::lock_guard lock(flight.mutex);
        flight.shape = shape;
        flight.begun_s = seconds();
        flight.last_begun_s = flight.begun_s;
        plan(flight.steps, algorithm, rank_, size_, flight.floats);
        flight.step = 0;
        flight.done.value.store(0, std::memory_order_relaxed);
        flight.begun = true;
        for (const auto& pieces : flight.arrived) {
            for (const Arrived& piece : pieces) {
                if (!alike(flight, piece.head)) return out_of_step(flight, piece.head);
            }
        }
        advance(flight, number);
    }

    void set_limit(double limit_s) { limit_s_ = limit_s; }

    // `took_s`: from when the last rank began it until it was complete here, whether anybody waited for it or not;
    // negative if this rank itself was the last. When ranks on other hosts began is not known: their clocks differ.
    bool land(uint32_t number, Landed& landed, double& took_s) {
        Flight& flight = at(number);
        const auto stop = [&] { return loss_.lost() || debtor(flight, true) >= 0; };
        if (!flight.done.wait(1, spin_s_, limit_s_, stop)) {
            const int64_t left = debtor(flight, true), late = debtor(flight, false);
            loss_.declare("rank " + (left >= 0 ? std::to_string(left) + " has left the group"
                                               : std::to_string(late) + " has not sent its part within " +
                                                     std::to_string(limit_s_) + " s"));
        }
        if (loss_.lost()) return false;
        std::lock_guard lock(flight.mutex);
        const bool known = std::all_of(links_.begin(), links_.end(), [](auto& l) { return !l || l->one_clock(); });
        took_s = known && flight.last_begun_s == flight.begun_s ? -1 : flight.done_s - flight.last_begun_s;
        landed.parts = flight.kept ? size_ : 1;
        landed.part[0] = flight.own;
        for (int64_t r = 0; flight.kept && r < size_; r++) {
            landed.part[r] = r == rank_ ? flight.own : flight.arrived[r].front().data;
        }
        return true;
    }

    void release(uint32_t number) {
        Flight& flight = at(number);
        {
            std::lock_guard lock(flight.mutex);
            for (int64_t r = 0; flight.kept && r < size_; r++) {
                if (r != rank_) drop(r, flight);
            }
            flight.kept = flight.begun = false;
        }
        places_.released(number + 1);
        released_.store(number + 1, std::memory_order_release);
    }

    // Seconds in which at least one message was under way.
    double busy_s() {
        std::lock_guard lock(busy_mutex_);
        return busy_s_ + (under_way_ ? seconds() - busy_since_ : 0);
    }

  private:
    struct Arrived {
        Head head;
        float* data;  // of the inbox, or where it belongs
    };
    struct Flight {
        std::mutex mutex;
        bool begun = false;
        bool kept = false;  // parts of others stay in `arrived` until the release
        uint32_t shape = 0;
        float* own = nullptr;
        int64_t floats = 0;
        std::vector<Step> steps;
        size_t step = 0;                         // the first that is not done
        std::vector<std::deque<Arrived>> arrived;  // of each peer, not used yet
        std::atomic<uint32_t> unsent{0};
        double begun_s = 0, last_begun_s = 0, done_s = 0;
        Counter done;  // 1: complete
    };
    // Twice the messages of one rank: another may be as far ahead as this one is behind.
    static constexpr uint32_t kNumbers = 2 * kMostMessages;
    static constexpr double kGoodbye_s = 1.0;

    Flight& at(uint32_t number) { return flights_[number % kNumbers]; }

    template <class Call>
    void each_link(Call call) {
        for (auto& link : links_) {
            if (link) call(*link);
        }
    }

    void wake_landing() {
        for (Flight& flight : flights_) {
            if (flight.done.waiting.load()) flight.done.wake();
        }
    }
    void wake_sent() {
        std::lock_guard lock(sent_mutex_);
        sent_.notify_all();
    }

    bool all_sent(uint32_t number) {
        const Flight& flight = at(number);
        const double start = seconds();
        std::unique_lock lock(sent_mutex_);
        while (flight.unsent.load(std::memory_order_acquire)) {
            if (loss_.lost()) return false;
            sent_.wait_for(lock, std::chrono::milliseconds(50));
            if (seconds() - start < limit_s_) continue;
            lock.unlock();
            loss_.declare("an earlier message could not be sent within " + std::to_string(limit_s_) + " s");
            return false;
        }
        return true;
    }

    // Called by the thread that receives from `peer`: where its next piece is to be read to.
    float* place(int64_t peer, const Head& head) {
        const bool known = head.number - released_.load(std::memory_order_acquire) < kNumbers;
        const bool sound = head.count >= 0 && head.count <= head.floats && head.floats <= most_floats_;
        if (!known || !sound || held_[peer].load() + head.count > 2 * Rooms::floats(most_floats_)) {
            loss_.declare("rank " + std::to_string(peer) + " sent what is no message of this group");
            return nullptr;
        }
        Flight& flight = at(head.number);
        {
            std::lock_guard lock(flight.mutex);
            if (flight.begun) {
                const Step* const step = step_for(flight, peer);
                if (!alike(flight, head) || !step || step->range.count != head.count) {
                    out_of_step(flight, head);
                    return nullptr;
                }
                if (step->what == Step::kTake) return flight.own + step->range.first;
            }
        }
        held_[peer].fetch_add(head.count);
        return inbox_.take(head.count);
    }

    void arrived(int64_t peer, const Head& head, float* data) {
        Flight& flight = at(head.number);
        std::lock_guard lock(flight.mutex);
        flight.arrived[peer].push_back({head, data});
        if (!flight.begun) return;
        if (links_[peer]->one_clock()) flight.last_begun_s = std::max(flight.last_begun_s, head.begun_s);
        advance(flight, head.number);
    }

    // The step that the next piece of `peer` belongs to.
    static const Step* step_for(const Flight& flight, int64_t peer) {
        size_t skip = flight.arrived[peer].size();
        for (size_t i = flight.step; i < flight.steps.size(); i++) {
            const Step& step = flight.steps[i];
            if (step.what == Step::kSend || (step.what != Step::kAddAll && step.peer != peer)) continue;
            if (!skip--) return &step;
        }
        return nullptr;
    }

    static bool alike(const Flight& flight, const Head& head) {
        return head.shape == flight.shape && head.floats == flight.floats;
    }

    void out_of_step(const Flight& flight, const Head& head) {
        loss_.declare("the ranks are out of step: a message of " + std::to_string(head.floats) + " floats where one of " +
                      std::to_string(flight.floats) + " was due, or by another algorithm");
    }

    // Does what can be done of the message. Its mutex is held.
    void advance(Flight& flight, uint32_t number) {
        for (; flight.step < flight.steps.size(); flight.step++) {
            const Step& step = flight.steps[flight.step];
            const Range& range = step.range;
            switch (step.what) {
                case Step::kSend:
                    flight.unsent.fetch_add(1, std::memory_order_relaxed);
                    links_[step.peer]->send({{number, flight.shape, flight.floats, range.count, flight.begun_s},
                                             flight.own + range.first, &flight.unsent});
                    break;
                case Step::kAdd:
                    if (!due(flight, step.peer, range)) return;
                    add(flight.own + range.first, flight.arrived[step.peer].front().data, range.count);
                    drop(step.peer, flight);
                    break;
                case Step::kAddAll:
                    if (!add_all(flight, range)) return;
                    break;
                case Step::kTake:
                    if (!due(flight, step.peer, range)) return;
                    take(flight, step);
                    break;
                case Step::kKeep:
                    if (!due(flight, step.peer, range)) return;
                    flight.kept = true;
                    break;
            }
        }
        flight.done_s = seconds();
        busy(-1);
        flight.done.raise(1);
    }

    // Whether the peer's next piece is there; it must be as long as the range it is for.
    bool due(Flight& flight, int64_t peer, const Range& range) {
        if (flight.arrived[peer].empty()) return false;
        if (flight.arrived[peer].front().head.count == range.count) return true;
        out_of_step(flight, flight.arrived[peer].front().head);
        return false;
    }

    bool add_all(Flight& flight, const Range& range) {
        const float* parts[kMostRanks];
        for (int64_t r = 0; r < size_; r++) {
            if (r != rank_ && !due(flight, r, range)) return false;
            parts[r] = r == rank_ ? flight.own + range.first : flight.arrived[r].front().data;
        }
        add_parts(flight.own + range.first, parts, size_, {0, range.count});
        for (int64_t r = 0; r < size_; r++) {
            if (r != rank_) drop(r, flight);
        }
        return true;
    }

    // Almost always it was read to its place.
    void take(Flight& flight, const Step& step) {
        const Arrived& piece = flight.arrived[step.peer].front();
        float* const to = flight.own + step.range.first;
        if (piece.data != to) std::memcpy(to, piece.data, sizeof(float) * step.range.count);
        drop(step.peer, flight);
    }

    void drop(int64_t peer, Flight& flight) {
        const Arrived& piece = flight.arrived[peer].front();
        if (!room_.has(piece.data)) {
            inbox_.give_back(piece.data, piece.head.count);
            held_[peer].fetch_sub(piece.head.count);
        }
        flight.arrived[peer].pop_front();
    }

    // The first peer that owes something to the message, of those that left if `only_left`; or -1.
    int64_t debtor(Flight& flight, bool only_left) {
        std::lock_guard lock(flight.mutex);
        for (size_t i = flight.step; i < flight.steps.size(); i++) {
            const Step& step = flight.steps[i];
            if (step.what == Step::kSend) continue;
            for (int64_t r = 0; r < size_; r++) {
                const bool owes = r != rank_ && (step.what == Step::kAddAll || step.peer == r);
                if (owes && flight.arrived[r].empty() && (!only_left || links_[r]->left())) return r;
            }
        }
        return -1;
    }

    void busy(int64_t more) {
        std::lock_guard lock(busy_mutex_);
        if (!under_way_) busy_since_ = seconds();
        under_way_ += more;
        if (!under_way_) busy_s_ += seconds() - busy_since_;
    }

    const int64_t rank_, size_, most_floats_;
    const double spin_s_;
    double limit_s_;
    Loss& loss_;
    Rooms places_;
    Pages room_;
    Inbox inbox_;
    std::deque<Flight> flights_;
    std::deque<std::atomic<int64_t>> held_;  // floats of each peer in the inbox
    uint32_t next_ = 0, unsent_from_ = 0;
    std::atomic<uint32_t> released_{0};
    std::mutex sent_mutex_;
    std::condition_variable sent_;
    std::mutex busy_mutex_;
    int64_t under_way_ = 0;
    double busy_since_ = 0, busy_s_ = 0;
    std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace hortator
