#ifdef ZINF_HAVE_LIBURING

#include "ring.h"

#include <sys/uio.h>

#include <cerrno>
#include <utility>

#include "error.h"

namespace zinf::aio {
namespace {

constexpr unsigned kFileSlots = 1024;
constexpr unsigned kBufferSlots = 4096;  // of at most 1 GiB each

// Best to plain. What a header does not know yet is simply not tried.
const std::vector<std::pair<unsigned, const char*>> kFlags = {
#ifdef IORING_SETUP_DEFER_TASKRUN
    {IORING_SETUP_DEFER_TASKRUN, "DEFER_TASKRUN"},  // Linux 6.1: completions are worked off when we ask, not in the middle of something
#endif
#ifdef IORING_SETUP_SINGLE_ISSUER
    {IORING_SETUP_SINGLE_ISSUER, "SINGLE_ISSUER"},  // 6.0: one thread submits, no locking in the kernel
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
    {IORING_SETUP_COOP_TASKRUN, "COOP_TASKRUN"},  // 5.19: no interrupts to run completions
#endif
    {IORING_SETUP_CQSIZE, "CQSIZE"},
};

unsigned power_of_two(unsigned n) {
    unsigned p = 1;
    while (p < n) p *= 2;
    return p;
}

std::string refusal(int code) {
    std::string text = "io_uring_setup: " + errno_text(code);
    if (code == EPERM) text += " (forbidden by seccomp or by the sysctl kernel.io_uring_disabled)";
    if (code == ENOMEM) text += " (RLIMIT_MEMLOCK too small, see ulimit -l)";
    if (code == ENOSYS) text += " (the kernel has no io_uring, or seccomp hides it)";
    return text;
}

}  // namespace

Ring::Ring(unsigned entries) {
    std::size_t dropped = 0;
    int status;
    do {
        io_uring_params params{};
        for (std::size_t i = dropped; i < kFlags.size(); ++i) params.flags |= kFlags[i].first;
        if (params.flags & IORING_SETUP_CQSIZE) params.cq_entries = 4 * power_of_two(entries);
        status = io_uring_queue_init_params(power_of_two(entries), &ring_, &params);
        sq_entries = params.sq_entries;
        cq_entries = params.cq_entries;
        features = params.features;
    } while (status == -EINVAL && dropped++ < kFlags.size());
    if (status < 0) throw IoError(-status, refusal(-status), "");
    for (std::size_t i = dropped; i < kFlags.size(); ++i) flags.emplace_back(kFlags[i].second);
    make_tables();
}

Ring::~Ring() { io_uring_queue_exit(&ring_); }

void Ring::make_tables() {
    const std::vector<int> none(kFileSlots, -1);
    int status = io_uring_register_files(&ring_, none.data(), kFileSlots);
    if (status == 0)
        file_slots = kFileSlots;
    else
        why_no_files = "io_uring_register_files: " + errno_text(-status);
    status = io_uring_register_buffers_sparse(&ring_, kBufferSlots);
    if (status == 0)
        buffer_slots = kBufferSlots;
    else
        why_no_buffers = "io_uring_register_buffers: " + errno_text(-status) + (status == -EINVAL ? " (needs Linux 5.19)" : "");
}

io_uring_sqe* Ring::sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (!sqe) {
        io_uring_submit(&ring_);
        sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
}

int Ring::submit_and_wait(std::optional<std::chrono::nanoseconds> timeout) {
    int status;
    if (timeout) {
        const auto ns = timeout->count();
        __kernel_timespec spec{ns / 1'000'000'000, ns % 1'000'000'000};
        io_uring_cqe* cqe = nullptr;
        status = io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &spec, nullptr);
    } else {
        status = io_uring_submit_and_wait(&ring_, 1);
    }
    return status < 0 ? status : 0;
}

int Ring::set_file(unsigned slot, int fd) {
    const int status = io_uring_register_files_update(&ring_, slot, &fd, 1);
    return status < 0 ? status : 0;
}

int Ring::set_buffer(unsigned slot, void* address, std::size_t nbytes) {
    const iovec range{address, nbytes};
    const __u64 tag = 0;
    const int status = io_uring_register_buffers_update_tag(&ring_, slot, &range, &tag, 1);
    return status < 0 ? status : 0;
}

}  // namespace zinf::aio

#endif
