// The backend for where io_uring is forbidden: a pool of threads, `zinf-io-N`, that call pread, pwrite and fdatasync.
// Each thread takes the next piece, sees it through its retries and rests, settles it, and looks for another.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.h"

namespace zinf::aio {

class ThreadPool final : public Backend {
public:
    explicit ThreadPool(const Options& options);
    ~ThreadPool() override;

    bool register_buffer(std::uint64_t, std::uint64_t, std::string& why) override;
    void unregister_buffer(std::uint64_t) override {}
    Report report() override;
    std::uint64_t registered_bytes() override { return 0; }
    void forget_file(int, bool) override {}

protected:
    int adopt(int) override { return -1; }
    void push(std::vector<RequestPtr>& batch) override;
    void stop() override;

private:
    void run();
    bool attempt(Piece& piece, std::unique_lock<std::mutex>& lock);

    std::mutex mutex_;  // guards the queue, the requests that stand in it, and stopping_
    std::condition_variable work_;
    Queue queue_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace zinf::aio
