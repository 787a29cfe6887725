// What the bindings know of a backend. Two implement it: Reactor (io_uring) and ThreadPool (pread and pwrite).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fault.h"
#include "file.h"
#include "request.h"

namespace zinf::aio {

struct Options {
    std::uint64_t block_size = 4 << 20;  // bytes: longest piece
    unsigned queue_depth = 16;           // pieces in flight at once
    unsigned threads = 4;                // of the thread pool
};

// What is really in use.
struct Report {
    std::vector<std::string> setup_flags;
    std::map<std::string, std::uint64_t> numbers;
    std::map<std::string, std::string> notes;  // what is in use, or why not
};

class Backend : public FileTable, public std::enable_shared_from_this<Backend> {
public:
    explicit Backend(const Options& options) : options_(options) {}

    void check_open() const;  // throws ClosedError
    std::shared_ptr<File> open(const std::string& path, bool write, bool create, Direct direct);
    // All or none: throws ClosedError without having queued anything. Every request has acquired its file.
    void submit(std::vector<RequestPtr> batch);
    // False where it is not possible; `why` says why.
    virtual bool register_buffer(std::uint64_t address, std::uint64_t nbytes, std::string& why) = 0;
    virtual void unregister_buffer(std::uint64_t address) = 0;
    // Waits for what is in flight, closes the files, ends the threads. Idempotent, thread safe.
    void close();
    virtual Report report() = 0;
    virtual std::uint64_t registered_bytes() = 0;

    const Options& options() const { return options_; }
    Stats& stats() { return stats_; }
    Faults& faults() { return faults_; }

protected:
    virtual int adopt(int fd) = 0;                         // slot in the table of fixed files, -1: none
    virtual void push(std::vector<RequestPtr>& batch) = 0;  // throws ClosedError
    virtual void stop() = 0;                               // called once, without a lock of ours held

    const Options options_;
    Stats stats_;
    Faults faults_;

private:
    std::mutex mutex_;  // guards the list of files
    std::vector<std::weak_ptr<File>> files_;
    std::atomic<bool> closing_{false};
    std::mutex stopping_;  // held while the one closer stops the threads, so that every other closer returns after it
    bool stopped_ = false;
};

// nullptr-free: throws IoError if the kernel refuses. `make_ring_backend` throws ENOSYS when built without liburing.
std::shared_ptr<Backend> make_ring_backend(const Options& options);
std::shared_ptr<Backend> make_thread_backend(const Options& options);
bool built_with_liburing();

}  // namespace zinf::aio
