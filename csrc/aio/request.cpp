#include "request.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace zinf::aio {
namespace {

constexpr unsigned kMaxTries = 1000;  // EINTR/EAGAIN in a row without a byte moved: about ten seconds, then it is an error

// Pieces end in any order, so how much there was is asked of the file, not of the piece that found its end.
std::string ended(const Request& request) {
    struct stat info {};
    std::string got = "fewer";
    if (::fstat(request.file().fd(), &info) == 0) {
        const std::uint64_t size = static_cast<std::uint64_t>(info.st_size);
        got = std::to_string(size > request.offset ? std::min(size - request.offset, request.length) : 0);
    }
    return "end of file, expected " + std::to_string(request.length) + " bytes, got " + got;
}

}  // namespace

void Stats::begin(std::uint64_t requests) {
    std::lock_guard lock(mutex_);
    if (in_flight_ == 0 && requests) since_ = Clock::now();
    in_flight_ += requests;
}

void Stats::end() {
    std::lock_guard lock(mutex_);
    if (--in_flight_ == 0) busy_ += Clock::now() - since_;
}

double Stats::busy_seconds() const {
    std::lock_guard lock(mutex_);
    const auto running = in_flight_ ? Clock::now() - since_ : Clock::duration{};
    return std::chrono::duration<double>(busy_ + running).count();
}

std::uint64_t Stats::in_flight() const {
    std::lock_guard lock(mutex_);
    return in_flight_;
}

Request::Request(Kind kind_, std::shared_ptr<File> file, std::uint64_t offset_, std::uint64_t address_, std::uint64_t length_,
                 std::shared_ptr<void> owner)
    : kind(kind_),
      offset(offset_),
      address(address_),
      length(length_),
      file_(std::move(file)),
      path_(std::make_shared<const std::string>(file_->path)),
      owner_(std::move(owner)) {}

Request::~Request() {
    if (file_) file_->release();  // refused before it ever reached a queue
}

const char* Request::verb() const {
    switch (kind) {
        case Kind::Read: return "read";
        case Kind::Write: return "write";
        default: return "datasync";
    }
}

bool Request::wait_for(std::chrono::nanoseconds timeout) {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return cond_.wait_for(lock, timeout, [this] { return done(); });
}

void Request::check() const {
    if (failure_) throw *failure_;
}

void Request::fail(int code, const std::string& message) {
    if (!failure_) failure_.emplace(code, message, *path_);
}

void Request::complete(Stats& stats) {
    if (failed()) stats.errors.fetch_add(1, std::memory_order_relaxed);
    auto& ops = kind == Kind::Read ? stats.ops_read : kind == Kind::Write ? stats.ops_written : stats.ops_datasync;
    ops.fetch_add(1, std::memory_order_relaxed);
    stats.end();
    ended_ = Clock::now();
    if (started_ == Clock::time_point{}) started_ = ended_;  // refused before any of it was handed out
    owner_.reset();
    auto file = std::move(file_);
    {
        std::lock_guard lock(mutex_);  // notify under the lock: a waiter may drop the last other reference as soon as it can see done_
        done_.store(true, std::memory_order_release);
        cond_.notify_all();
    }
    file->release();  // after that: when File::close() returns, the tickets of its requests are done
}

void Request::keep_owner_forever() {
    if (owner_) new std::shared_ptr<void>(owner_);
}

std::uint64_t Piece::span() const {
    const std::uint64_t rest = length - moved;
    if (fate.limit == 0 || fate.limit >= rest) return rest;
    if (!request->file().direct) return fate.limit;
    return std::min(rest, std::max(kPage, fate.limit / kPage * kPage));
}

std::chrono::microseconds Piece::backoff() const {
    if (tries <= 2) return std::chrono::microseconds(0);
    return std::chrono::microseconds(std::min(10000u, 100u << std::min(tries, 12u)));
}

Verdict examine(Piece& piece, std::int64_t result, Stats& stats) {
    Request& request = *piece.request;
    if (result == -EINTR || result == -EAGAIN) {
        if (++piece.tries <= kMaxTries) {
            stats.retries.fetch_add(1, std::memory_order_relaxed);
            return Verdict::Retry;
        }
    }
    const std::string part = piece.length == request.length ? "" : " (in the " + std::to_string(piece.length) + " bytes at " +
                                                                       std::to_string(request.offset + piece.begin) + ")";
    if (result < 0) {
        const int code = static_cast<int>(-result);
        request.fail(code, request.describe() + ": " + errno_text(code) + (request.kind == Kind::Datasync ? "" : part));
        return Verdict::Error;
    }
    piece.tries = 0;
    if (request.kind == Kind::Datasync) return Verdict::Done;

    // With O_DIRECT only whole pages can be continued from; a ragged end is the end of the file and shows again as no progress.
    const std::uint64_t got = static_cast<std::uint64_t>(result);
    const bool whole = piece.moved + got >= piece.length;
    const std::uint64_t step = whole ? piece.length - piece.moved : request.file().direct ? got / kPage * kPage : got;
    piece.moved += step;
    (request.kind == Kind::Read ? stats.bytes_read : stats.bytes_written).fetch_add(step, std::memory_order_relaxed);
    if (whole) return Verdict::Done;
    if (step == 0) {
        const bool read = request.kind == Kind::Read;
        request.fail(read ? ENODATA : EIO, request.describe() + ": " + (read ? ended(request) : "nothing more was written" + part));
        return Verdict::Error;
    }
    stats.shorts.fetch_add(1, std::memory_order_relaxed);
    return Verdict::Short;
}

void Queue::settle(Piece& piece, Stats& stats) {
    RequestPtr request = std::move(piece.request);
    --request->pieces;
    const std::uint64_t total = request->kind == Kind::Datasync ? 1 : request->length;
    if (request->pieces == 0 && (request->failed() || request->issued == total)) request->complete(stats);
}

void Queue::fail_all(int code, const std::string& why, Stats& stats) {
    for (RequestPtr& request : requests_) {
        request->fail(code, request->describe() + why);
        if (request->pieces == 0 && !request->done()) request->complete(stats);
    }
    requests_.clear();
}

}  // namespace zinf::aio
