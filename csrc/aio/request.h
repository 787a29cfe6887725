// The life of a request, the same for every native backend: cut into pieces, each piece examined when the kernel is done with it,
// completed exactly once when nothing of it is in flight any more.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "error.h"
#include "fault.h"
#include "file.h"

namespace zinf::aio {

using Clock = std::chrono::steady_clock;

// Counters that stats() shows. Bytes are counted as they move, operations when a request completes.
struct Stats {
    std::atomic<std::uint64_t> bytes_read{0}, bytes_written{0}, ops_read{0}, ops_written{0}, ops_datasync{0};
    std::atomic<std::uint64_t> retries{0}, shorts{0}, errors{0}, fixed{0}, pieces{0};

    void begin(std::uint64_t requests);
    void end();
    double busy_seconds() const;  // time with at least one request in flight
    std::uint64_t in_flight() const;

private:
    mutable std::mutex mutex_;
    std::uint64_t in_flight_ = 0;
    Clock::time_point since_{};
    Clock::duration busy_{};
};

class Request {
public:
    // The caller has acquired `file`. `owner` keeps the memory alive; it is dropped before the request reads as done.
    Request(Kind kind, std::shared_ptr<File> file, std::uint64_t offset, std::uint64_t address, std::uint64_t length, std::shared_ptr<void> owner);
    ~Request();

    const Kind kind;
    const std::uint64_t offset, address, length;  // bytes

    const char* verb() const;
    std::string describe() const { return aio::describe(verb(), offset, length); }
    const std::string& path() const { return *path_; }

    // Any thread.
    bool done() const { return done_.load(std::memory_order_acquire); }
    bool wait_for(std::chrono::nanoseconds timeout);  // false: still in flight
    void check() const;                               // after done(): throws IoError if it failed
    Clock::time_point started() const { return started_; }  // after done(): its first piece was handed out
    Clock::time_point ended() const { return ended_; }      // after done()

    // Only whoever holds the queue this request stands in.
    File& file() const { return *file_; }
    void fail(int code, const std::string& message);  // the first failure stays
    bool failed() const { return failure_.has_value(); }
    void start() { started_ = Clock::now(); }
    void complete(Stats& stats);
    void keep_owner_forever();
    std::uint64_t issued = 0;  // bytes cut into pieces so far; a datasync counts as one piece of one byte
    std::uint32_t pieces = 0;  // in flight

private:
    std::shared_ptr<File> file_;  // empty once complete
    std::shared_ptr<const std::string> path_;
    std::shared_ptr<void> owner_;
    std::optional<IoError> failure_;
    Clock::time_point started_{}, ended_{};  // published by done_
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable cond_;
};

using RequestPtr = std::shared_ptr<Request>;

// A part of a request that the kernel handles at once.
struct Piece {
    RequestPtr request;
    std::uint64_t begin = 0;   // bytes from the start of the request
    std::uint64_t length = 0;  // bytes
    std::uint64_t moved = 0;   // bytes already transferred
    unsigned tries = 0;        // EINTR/EAGAIN in a row
    Fate fate{};
    bool decided = false;      // has the fate of this try been asked for?

    std::uint64_t offset() const { return request->offset + begin + moved; }
    std::uint64_t address() const { return request->address + begin + moved; }
    std::uint64_t span() const;                 // bytes to ask of the kernel now
    std::chrono::microseconds backoff() const;  // before the next try
};

enum class Verdict { Retry, Error, Short, Done };

// The one place where results are judged. `result` is bytes or -errno. On Error the request is marked as failed.
Verdict examine(Piece& piece, std::int64_t result, Stats& stats);

// Requests that wait for the kernel, in order of arrival. Not thread safe.
class Queue {
public:
    void push(RequestPtr request) { requests_.push_back(std::move(request)); }
    bool empty() const { return requests_.empty(); }
    // Cuts the next piece of at most `block` bytes; `bound(address)` may ask for less (the end of a registered buffer). False: nothing to cut.
    template <class Bound>
    bool cut(Piece& piece, std::uint64_t block, Stats& stats, Bound bound);
    // A piece came to its end; completes the request if it was the last.
    static void settle(Piece& piece, Stats& stats);
    void fail_all(int code, const std::string& why, Stats& stats);

private:
    std::deque<RequestPtr> requests_;
};

template <class Bound>
bool Queue::cut(Piece& piece, std::uint64_t block, Stats& stats, Bound bound) {
    while (!requests_.empty()) {
        RequestPtr request = requests_.front();
        const std::uint64_t total = request->kind == Kind::Datasync ? 1 : request->length;
        if (request->failed() || request->issued == total) {  // a failure cancels what was not handed out yet
            requests_.pop_front();
            if (request->pieces == 0 && !request->done()) request->complete(stats);
            continue;
        }
        std::uint64_t length = total - request->issued;
        if (length > block) length = block;
        if (request->kind != Kind::Datasync) {
            const std::uint64_t most = bound(request->address + request->issued);
            if (length > most) length = most;
        }
        if (request->issued == 0) request->start();
        piece = Piece{request, request->issued, length};
        request->issued += length;
        ++request->pieces;
        stats.pieces.fetch_add(1, std::memory_order_relaxed);
        if (request->issued == total) requests_.pop_front();
        return true;
    }
    return false;
}

}  // namespace zinf::aio
