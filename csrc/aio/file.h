// An open file, and the rule for closing it: the descriptor outlives every request that uses it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace zinf::aio {

constexpr std::uint64_t kPage = 4096;  // bytes: alignment demanded of O_DIRECT requests, the strictest in practice

enum class Direct { Off, Auto, Require };

// Who registered the file with the kernel, and must forget it before the kernel lets go of the open file.
class FileTable {
public:
    virtual ~FileTable() = default;
    virtual void forget_file(int slot, bool wait) = 0;
};

class File {
public:
    // Throws IoError. Files are created 0600; links are not followed; the descriptor is not inherited.
    static std::shared_ptr<File> open(const std::string& path, bool write, bool create, Direct direct);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string path;
    const bool writable;
    const bool direct;         // O_DIRECT really in use
    const std::string note;    // why not, when it was asked for
    int fd() const { return fd_; }
    int slot() const { return slot_; }  // index in the ring's table of fixed files, -1: none

    // Called once, before the file is shared between threads.
    void attach(std::weak_ptr<FileTable> table, int slot);

    bool acquire();  // one more request in flight; false once close() has begun
    void release();
    bool closed() const { return closing_; }

    // Waits until nothing is in flight, then closes. Idempotent, safe from any thread but the reactor's.
    void close();

private:
    File(std::string path, int fd, bool writable, bool direct, std::string note);
    void close_descriptor(bool wait);

    std::atomic<int> fd_;
    int slot_ = -1;
    std::weak_ptr<FileTable> table_;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable idle_;
    std::uint64_t in_flight_ = 0;
    std::atomic<bool> closing_{false};
};

}  // namespace zinf::aio
