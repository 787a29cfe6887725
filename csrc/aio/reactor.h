// The io_uring backend: one thread, `zinf-io`, owns the ring and everything that moves through it.
//
//   1 drain    take over what other threads left in the inbox
//   2 issue    hand pieces to the ring while fewer than queue_depth are in flight
//   3 wait     one system call submits and sleeps until something completes; an eventfd read that is always on the ring wakes it
//   4 reap     examine every completion: retry, error, short, done
//
// [Note: who may touch what] Other threads touch the inbox (under its mutex) and the eventfd, nothing else. The ring, its tables, the queue and the
// pieces belong to the reactor thread, as SINGLE_ISSUER demands; what another thread wants done there (register a buffer, a file) travels
// as a closure through the inbox. The thread never touches a Python object.
#pragma once

#ifdef ZINF_HAVE_LIBURING

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.h"
#include "buffer.h"
#include "ring.h"

namespace zinf::aio {

class Reactor final : public Backend {
public:
    explicit Reactor(const Options& options);  // throws IoError if the kernel refuses a ring
    ~Reactor() override;

    bool register_buffer(std::uint64_t address, std::uint64_t nbytes, std::string& why) override;
    void unregister_buffer(std::uint64_t address) override;
    Report report() override;
    std::uint64_t registered_bytes() override { return registered_bytes_.load(); }
    void forget_file(int slot, bool wait) override;

protected:
    int adopt(int fd) override;
    void push(std::vector<RequestPtr>& batch) override;
    void stop() override;

private:
    using Command = std::function<void()>;

    // Other threads.
    void post(Command command);                     // throws ClosedError
    void call(Command command);                     // post and wait; the command must not throw
    void wake();

    // The reactor thread.
    void run(std::promise<void>& ready);
    void loop();
    bool drain();                                   // false: stopping, and the inbox is empty
    void issue();
    void start(Piece& piece);                       // asks the faults, then prepares
    void prepare(Piece& piece);
    void park(Piece& piece, Clock::duration delay);
    void unpark();
    void finish(Piece& piece, int result);
    void arm_wake();
    void abandon(int code);                         // the ring itself broke: resolve every waiter
    std::optional<std::chrono::nanoseconds> patience() const;

    std::mutex mutex_;  // guards the inbox
    std::vector<RequestPtr> inbox_;
    std::vector<Command> commands_;
    bool stopping_ = false, broken_ = false;
    bool signalled_ = false;  // the eventfd is set and not read yet

    int eventfd_ = -1;
    std::uint64_t wake_count_ = 0;  // where the eventfd read lands
    std::unique_ptr<Ring> ring_;
    Queue queue_;
    std::vector<Piece> pieces_;   // queue_depth of them, never resized: the ring holds their addresses
    std::vector<Piece*> idle_;
    std::multimap<Clock::time_point, Piece*> parked_;  // pieces that wait to be tried again
    std::unique_ptr<BufferTable> buffers_;
    std::vector<unsigned> file_slots_;  // free
    Report granted_;                    // written before the constructor returns
    std::atomic<std::uint64_t> registered_bytes_{0}, registered_ranges_{0}, fixed_files_{0};
    std::thread thread_;
};

}  // namespace zinf::aio

#endif
