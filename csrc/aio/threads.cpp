#include "threads.h"

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <limits>

namespace zinf::aio {
namespace {

std::int64_t transfer(const Piece& piece) {
    const Request& request = *piece.request;
    const int fd = request.file().fd();
    const auto address = reinterpret_cast<void*>(piece.address());
    const auto offset = static_cast<off_t>(piece.offset());
    std::int64_t result;
    switch (request.kind) {
        case Kind::Read: result = ::pread(fd, address, piece.span(), offset); break;
        case Kind::Write: result = ::pwrite(fd, address, piece.span(), offset); break;
        default: result = ::fdatasync(fd);
    }
    return result < 0 ? -errno : result;
}

}  // namespace

ThreadPool::ThreadPool(const Options& options) : Backend(options) {
    try {
        for (unsigned i = 0; i < options_.threads; ++i) {
            threads_.emplace_back([this] { run(); });
            pthread_setname_np(threads_.back().native_handle(), ("zinf-io-" + std::to_string(i)).c_str());
        }
    } catch (...) {  // the system has no more threads to give
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

bool ThreadPool::register_buffer(std::uint64_t, std::uint64_t, std::string& why) {
    why = "only io_uring registers buffers";
    return false;
}

Report ThreadPool::report() {
    Report report;
    report.numbers["threads"] = options_.threads;
    report.notes["registered_buffers"] = report.notes["registered_files"] = "only io_uring registers them";
    return report;
}

void ThreadPool::push(std::vector<RequestPtr>& batch) {
    {
        std::lock_guard lock(mutex_);
        if (stopping_) throw ClosedError("the I/O engine is closed");
        for (auto& request : batch) queue_.push(request);
    }
    work_.notify_all();
}

void ThreadPool::stop() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void ThreadPool::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        Piece piece;
        if (queue_.cut(piece, options_.block_size, stats_, [](std::uint64_t) { return std::numeric_limits<std::uint64_t>::max(); })) {
            while (!attempt(piece, lock)) {
            }
            Queue::settle(piece, stats_);
        } else if (stopping_) {
            return;
        } else {
            work_.wait(lock);
        }
    }
}

// One try, without the lock but for the judgement. True: done or failed.
bool ThreadPool::attempt(Piece& piece, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    std::this_thread::sleep_for(piece.backoff());
    piece.fate = faults_.decide(piece.request->kind, piece.request->path());
    std::this_thread::sleep_for(std::chrono::milliseconds(piece.fate.delay));
    const std::int64_t result = piece.fate.error ? -piece.fate.error : transfer(piece);
    lock.lock();
    const Verdict verdict = examine(piece, result, stats_);
    return verdict == Verdict::Done || verdict == Verdict::Error;
}

std::shared_ptr<Backend> make_thread_backend(const Options& options) { return std::make_shared<ThreadPool>(options); }

}  // namespace zinf::aio
