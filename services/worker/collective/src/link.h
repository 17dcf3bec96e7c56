// A connected stream socket to one peer: one thread that sends and one that receives, both of which sleep in the
// kernel when there is nothing to do.
#pragma once
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "loss.h"
#include "wait.h"

namespace hortator {

// Before each piece. Both ends are of one version and one byte order: who forms a group sees to that.
struct Head {
    uint32_t number, shape;  // of the message
    int64_t floats;          // of the whole message
    int64_t count;           // floats that follow
    double begun_s;          // when the sender began the message, by its clock
};
// In place of a shape: the peer leaves; the peer says why the group is lost, in `count` bytes; the peer's clock is
// that of host `number`.
constexpr uint32_t kLeaves = 0xFFFFFFFF, kLost = 0xFFFFFFFE, kClock = 0xFFFFFFFD;
constexpr int64_t kReasonBytes = 256;

class Link {
  public:
    struct Piece {
        Head head;
        const float* data;
        std::atomic<uint32_t>* unsent;  // one less when the kernel has it all; null: nobody asks
    };
    // What arrives: where the piece of this head is to be read to (null: nothing is right with it, stop); then that
    // it is there.
    struct Reader {
        std::function<float*(const Head&)> place;
        std::function<void(const Head&, float*)> arrived;
        std::function<void()> left;  // the peer will not send any more
        std::function<void()> sent;  // all of a message's pieces so far
    };

    Link(int fd, int64_t peer, Loss& loss, const std::vector<int>& cores)
        : fd_(fd), peer_(peer), loss_(loss), cores_(cores) {
        const int on = 1, idle_s = 5, every_s = 2, times = 3, bytes = 4 << 20;
        // Fails where the socket is not of TCP. There the kernel finds the size of buffers by itself, and better.
        if (!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on)) {
            setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
            setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
            setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
            setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
        } else {
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        }
    }
    ~Link() {
        stop();
        ::close(fd_);
    }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    void start(Reader reader) {
        reader_ = std::move(reader);
        receiver_ = std::thread([this] { receive(); });
        sender_ = std::thread([this] { serve(); });
        send({{clock_, kClock, 0, 0, 0}, nullptr, nullptr});
    }

    // After what was sent before. What is short and can leave at once does so from here.
    void send(const Piece& piece) {
        {
            std::unique_lock busy(sending_, std::try_to_lock);
            std::unique_lock lock(mutex_);
            int64_t sent = 0;
            if (busy.owns_lock() && queue_.empty() && bytes_of(piece) <= kShortBytes) {
                sent = write(piece, 0, MSG_DONTWAIT);
                if (sent == bytes_of(piece)) return done(piece);
            }
            queue_.push_back({piece, std::max<int64_t>(sent, 0)});
        }
        work_.notify_one();
    }

    // Says goodbye behind everything that was sent; `wait_s` at most for it to leave. Then nothing more is sent.
    void leave(double wait_s) {
        send({{0, kLeaves, 0, 0, 0}, nullptr, nullptr});
        std::unique_lock lock(mutex_);
        idle_.wait_for(lock, std::chrono::duration<double>(wait_s),
                       [this] { return (queue_.empty() && !at_work_) || loss_.lost(); });
    }

    // The group is lost: tell the peer why, if nothing is under way, and end the connection.
    void give_up(const std::string& reason) {
        std::unique_lock busy(sending_, std::try_to_lock);
        if (busy.owns_lock()) {
            const Head head{0, kLost, 0, int64_t(std::min<size_t>(reason.size(), kReasonBytes)), 0};
            iovec parts[2] = {{const_cast<Head*>(&head), sizeof head},
                              {const_cast<char*>(reason.data()), size_t(head.count)}};
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = 2;
            (void)!sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        shutdown(fd_, SHUT_WR);
        work_.notify_all();
        idle_.notify_all();
    }

    // Whether this process and the peer read the same clock.
    bool one_clock() const { return one_clock_.load(std::memory_order_relaxed); }

    bool left() const { return left_.load(std::memory_order_acquire); }

    void stop() {
        {
            std::lock_guard lock(mutex_);
            stopping_.store(true);
        }
        work_.notify_all();
        shutdown(fd_, SHUT_RDWR);
        if (sender_.joinable()) sender_.join();
        if (receiver_.joinable()) receiver_.join();
    }

  private:
    struct Task {
        Piece piece;
        int64_t sent;
    };
    static constexpr int64_t kShortBytes = 32 << 10;

    static int64_t bytes_of(const Piece& piece) {
        return int64_t(sizeof(Head) + sizeof(float) * piece.head.count);
    }

    // From byte `sent` on; how far it came. -1 and errno: the connection is broken.
    int64_t write(const Piece& piece, int64_t sent, int flags) {
        const int64_t head = sizeof(Head);
        while (sent < bytes_of(piece)) {
            iovec parts[2] = {{}, {const_cast<float*>(piece.data), size_t(bytes_of(piece) - head)}};
            int first = 1;
            if (sent < head) {
                parts[0] = {reinterpret_cast<char*>(const_cast<Head*>(&piece.head)) + sent, size_t(head - sent)};
                first = 0;
            } else {
                parts[1].iov_base = static_cast<char*>(parts[1].iov_base) + (sent - head);
                parts[1].iov_len -= size_t(sent - head);
            }
            msghdr message{};
            message.msg_iov = parts + first;
            message.msg_iovlen = size_t(2 - first);
            const ssize_t went = sendmsg(fd_, &message, flags | MSG_NOSIGNAL);
            if (went >= 0) {
                sent += went;
            } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
                return sent;
            } else if (errno != EINTR) {
                return -1;
            }
        }
        return sent;
    }

    void done(const Piece& piece) {
        if (piece.unsent && piece.unsent->fetch_sub(1, std::memory_order_acq_rel) == 1) reader_.sent();
    }

    void serve() {
        pin();
        for (;;) {
            Task task;
            {
                std::unique_lock lock(mutex_);
                at_work_ = false;
                if (queue_.empty()) idle_.notify_all();
                work_.wait(lock, [this] { return stopping_.load() || !queue_.empty(); });
                if (stopping_.load()) return;
                at_work_ = true;
            }
            int64_t went;
            {
                std::lock_guard busy(sending_);
                std::unique_lock lock(mutex_);
                task = queue_.front();
                queue_.pop_front();
                lock.unlock();
                went = write(task.piece, task.sent, 0);
            }
            // A closed connection is the receiver's to judge: the peer may have said goodbye before.
            if (went < 0 && errno != EPIPE && errno != ECONNRESET) {
                loss_.declare("rank " + std::to_string(peer_) + " cannot be reached: " + std::strerror(errno));
            }
            done(task.piece);
        }
    }

    void receive() {
        pin();
        for (Head head; read(&head, sizeof head);) {
            if (head.shape == kLeaves) {
                left_.store(true, std::memory_order_release);
                reader_.left();
                return;
            }
            if (head.shape == kLost) return hear(head.count);
            if (head.shape == kClock) {
                one_clock_.store(head.number == clock_, std::memory_order_relaxed);
                continue;
            }
            float* const to = reader_.place(head);
            if (!to || !read(to, sizeof(float) * size_t(head.count))) break;
            reader_.arrived(head, to);
        }
        if (!stopping_.load()) loss_.declare("rank " + std::to_string(peer_) + " has ended");
    }

    void hear(int64_t bytes) {
        char reason[kReasonBytes + 1] = {};
        if (bytes < 0 || bytes > kReasonBytes || !read(reason, size_t(bytes))) reason[0] = 0;
        loss_.declare("rank " + std::to_string(peer_) + " gave up: " + reason, true);
    }

    bool read(void* to, size_t bytes) {
        for (char* at = static_cast<char*>(to); bytes;) {
            const ssize_t came = recv(fd_, at, bytes, MSG_WAITALL);
            if (came > 0) {
                at += came;
                bytes -= size_t(came);
            } else if (came == 0 || errno != EINTR) {
                return false;
            }
        }
        return true;
    }

    // What tells hosts apart that were started at different times. Steady clocks count from the start.
    static uint32_t host() {
        std::ifstream file("/proc/sys/kernel/random/boot_id");
        std::string id;
        file >> id;
        return uint32_t(std::hash<std::string>()(id));
    }

    void pin() const {
        if (cores_.empty()) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int core : cores_) CPU_SET(core, &set);
        sched_setaffinity(0, sizeof set, &set);
    }

    const int fd_;
    const int64_t peer_;
    Loss& loss_;
    const std::vector<int> cores_;
    const uint32_t clock_ = host();
    Reader reader_;
    std::mutex sending_;  // held while a piece is written, and taken before `mutex_`
    std::mutex mutex_;    // of the queue
    std::condition_variable work_, idle_;
    std::deque<Task> queue_;
    bool at_work_ = false;
    std::atomic<bool> stopping_{false}, left_{false}, one_clock_{false};
    std::thread sender_, receiver_;
};

}  // namespace hortator
