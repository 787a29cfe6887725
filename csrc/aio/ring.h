// The io_uring itself: how it is set up, what the kernel granted, and the few calls the reactor makes. Used by one thread only.
#pragma once

#ifdef ZINF_HAVE_LIBURING

#include <liburing.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zinf::aio {

class Ring {
public:
    // Tries the best setup flags first and drops one at a time, newest first, as long as the kernel answers EINVAL. Throws IoError.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    io_uring_sqe* sqe();  // never null: makes room by submitting
    // Submits what is prepared and waits for one completion, or until the timeout. 0 or -errno.
    int submit_and_wait(std::optional<std::chrono::nanoseconds> timeout);
    // Calls use(user_data, res) for every completion that is there.
    template <class Use>
    void reap(Use use);

    // Tables of fixed files and buffers. `why` stays empty where they work.
    unsigned file_slots = 0, buffer_slots = 0;
    std::string why_no_files, why_no_buffers;
    int set_file(unsigned slot, int fd);                           // fd -1: forget. 0 or -errno
    int set_buffer(unsigned slot, void* address, std::size_t nbytes);  // 0 bytes: forget. 0 or -errno

    std::vector<std::string> flags;  // granted
    unsigned sq_entries = 0, cq_entries = 0, features = 0;

private:
    void make_tables();
    io_uring ring_{};
};

template <class Use>
void Ring::reap(Use use) {
    unsigned head, seen = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring_, head, cqe) {
        ++seen;
        if (cqe->user_data != LIBURING_UDATA_TIMEOUT) use(cqe->user_data, cqe->res);
    }
    io_uring_cq_advance(&ring_, seen);
}

}  // namespace zinf::aio

#endif
