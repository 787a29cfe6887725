// What Python cannot reach, and what a race detector should see without an interpreter around it: both native backends under many threads,
// the ladder of setup flags, a kernel without tables, a ring that breaks, the table of registered buffers.
// tests/test_aio.py builds this under ThreadSanitizer and under AddressSanitizer and runs it. Exit status 0: all well.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "aio/backend.h"
#include "aio/buffer.h"
#include "tests/expect.h"
#ifdef ZINF_HAVE_LIBURING
#include <liburing.h>
#endif

using namespace zinf::aio;

namespace {

std::atomic<unsigned> refused_flags{0};  // io_uring_setup answers EINVAL to any of these, as an older kernel would
std::atomic<bool> refuse_tables{false}, break_ring{false};

constexpr std::uint64_t kBlock = 64 << 10;

struct Memory {
    explicit Memory(std::size_t n) : nbytes(n), base(static_cast<unsigned char*>(std::aligned_alloc(kPage, n))) {}
    ~Memory() { std::free(base); }
    Memory(const Memory&) = delete;
    std::uint64_t address(std::size_t at = 0) const { return reinterpret_cast<std::uint64_t>(base) + at; }
    void fill(unsigned seed) {
        std::mt19937_64 random(seed);
        for (std::size_t i = 0; i < nbytes; i += 8) {
            const std::uint64_t value = random();
            std::memcpy(base + i, &value, 8);
        }
    }
    std::size_t nbytes;
    unsigned char* base;
};

std::string scratch(const std::string& name) {
    const char* folder = std::getenv("ZINF_TEST_DIR");
    return std::string(folder ? folder : ".") + "/aio_test_" + name;
}

RequestPtr request(Kind kind, const std::shared_ptr<File>& file, std::uint64_t offset, std::uint64_t address, std::uint64_t length,
                   std::shared_ptr<void> owner = nullptr) {
    EXPECT(file->acquire());
    return std::make_shared<Request>(kind, file, offset, address, length, std::move(owner));
}

int outcome(const RequestPtr& request) {
    EXPECT(request->wait_for(std::chrono::seconds(60)));
    try {
        request->check();
    } catch (const IoError& error) {
        return error.code();
    }
    return 0;
}

std::vector<Rule> storm() {
    std::vector<Rule> rules;
    for (const Fate fate : {Fate{EAGAIN, 0, 0}, Fate{EINTR, 0, 0}, Fate{0, 8192, 0}, Fate{0, 0, 1}}) {
        Rule rule;
        rule.kinds[0] = rule.kinds[1] = rule.kinds[2] = true;
        rule.probability = 0.15;
        rule.seed = rules.size();
        rule.fate = fate;
        rules.push_back(rule);
    }
    return rules;
}

// Threads submit, wait, sync, register, close files and ask for statistics, all at once and in bad weather.
void crowd(const std::shared_ptr<Backend>& backend) {
    backend->faults().arm(storm());
    std::atomic<int> released{0};
    std::vector<std::thread> threads;
    for (unsigned k = 0; k < 6; ++k) {
        threads.emplace_back([&, k] {
            const std::size_t size = kBlock * 5;
            Memory out(size), in(size);
            for (unsigned round = 0; round < 8; ++round) {
                out.fill(k * 100 + round);
                std::string why;
                const bool registered = round % 2 && backend->register_buffer(out.address(), size, why);
                auto file = backend->open(scratch("crowd" + std::to_string(k)), true, true, Direct::Auto);
                std::shared_ptr<void> owner = make_owner(&released, [](void* count) { ++*static_cast<std::atomic<int>*>(count); });
                auto write = request(Kind::Write, file, 0, out.address(), size, owner);
                owner.reset();
                backend->submit({write});
                EXPECT(outcome(write) == 0);
                EXPECT(released >= 1);
                auto sync = request(Kind::Datasync, file, 0, 0, 0);
                std::vector<RequestPtr> reads;
                for (std::size_t at = 0; at < size; at += 3 * kPage) reads.push_back(request(Kind::Read, file, at, in.address(at), std::min<std::size_t>(3 * kPage, size - at)));
                backend->submit({sync});
                backend->submit(reads);
                backend->stats().busy_seconds();
                backend->report();
                for (const auto& read : reads) EXPECT(outcome(read) == 0);
                EXPECT(outcome(sync) == 0);
                EXPECT(std::memcmp(out.base, in.base, size) == 0);
                if (registered) backend->unregister_buffer(out.address());
                if (round % 2) file->close();
            }
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT(released == 6 * 8);
    EXPECT(backend->stats().in_flight() == 0);
    std::vector<std::thread> closers;
    for (int i = 0; i < 3; ++i) closers.emplace_back([&] { backend->close(); });
    for (auto& closer : closers) closer.join();
}

// close() while others submit: every request either is refused or completes.
void close_under_fire(const std::shared_ptr<Backend>& backend) {
    auto file = backend->open(scratch("fire"), true, true, Direct::Auto);
    std::atomic<int> done{0}, refused{0};
    std::vector<std::thread> threads;
    for (unsigned k = 0; k < 4; ++k) {
        threads.emplace_back([&, k] {
            Memory memory(kBlock);
            memory.fill(k);
            while (true) {
                if (!file->acquire()) break;
                auto write = std::make_shared<Request>(Kind::Write, file, k * kBlock, memory.address(), kBlock, nullptr);
                try {
                    backend->submit({write});
                } catch (const ClosedError&) {
                    ++refused;
                    break;
                }
                EXPECT(outcome(write) == 0);
                ++done;
            }
        });
    }
    while (done < 20) std::this_thread::yield();
    backend->close();
    for (auto& thread : threads) thread.join();
    EXPECT(backend->stats().in_flight() == 0);
}

// The kernel never stops asking for patience: after about ten seconds that is an error too.
void endless_again(const std::shared_ptr<Backend>& backend) {
    Rule rule;
    rule.kinds[1] = true;
    rule.probability = 1;
    rule.fate.error = EAGAIN;
    backend->faults().arm({rule});
    Memory memory(kPage);
    auto write = request(Kind::Write, backend->open(scratch("again"), true, true, Direct::Auto), 0, memory.address(), kPage);
    backend->submit({write});
    EXPECT(outcome(write) == EAGAIN);
    backend->close();
}

void buffers() {
    constexpr std::uint64_t gib = std::uint64_t{1} << 30;
    BufferTable table(4);
    EXPECT(table.bound(12345) == UINT64_MAX && table.find(12345) == nullptr);
    const auto segments = table.add(kPage, 2 * gib + kPage);  // three slots
    EXPECT(segments.size() == 3 && segments[2].end == kPage + 2 * gib + kPage);
    EXPECT(table.bound(0) == kPage && table.bound(kPage) == gib && table.bound(kPage + gib - 1) == 1 && table.bound(kPage + gib) == gib);
    EXPECT(table.find(kPage + gib)->slot != table.find(kPage + gib - 1)->slot);
    EXPECT(table.find(segments[2].end) == nullptr && table.find(kPage - 1) == nullptr);
    EXPECT(table.add(8 * gib, 2 * gib).empty());  // one slot is left
    EXPECT(table.registered_bytes() == 2 * gib + kPage && table.ranges() == 1);
    for (const auto& [address, nbytes] : {std::pair(kPage, kPage), {std::uint64_t{0}, 2 * kPage}, {gib, kPage}, {2 * gib, 8 * gib}, {std::uint64_t{7}, std::uint64_t{0}}}) {
        bool refused = false;
        try {
            table.add(address, nbytes);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        EXPECT(refused);
    }
    EXPECT(table.add(segments[2].end, kPage).size() == 1);  // next to it is not in it
    EXPECT(table.remove(kPage).size() == 3 && table.remove(kPage).empty() && table.ranges() == 1);
    EXPECT(table.add(8 * gib, 3 * gib).size() == 3);
}

#ifdef ZINF_HAVE_LIBURING

// Older kernels: each answers EINVAL to the flags it does not know; the rest are kept.
void ladder(const Options& options) {
    const std::vector<std::pair<unsigned, std::size_t>> kernels = {{0, 4}, {1u << 13, 3}, {3u << 12, 2}, {3u << 12 | 1u << 8, 1}, {3u << 12 | 1u << 8 | 1u << 3, 0}};
    for (const auto& [flags, kept] : kernels) {
        refused_flags = flags;
        auto backend = make_ring_backend(options);
        EXPECT(backend->report().setup_flags.size() == kept);
        Memory memory(kBlock * 9);
        memory.fill(flags);
        auto write = request(Kind::Write, backend->open(scratch("ladder"), true, true, Direct::Auto), 0, memory.address(), memory.nbytes);
        backend->submit({write});
        EXPECT(outcome(write) == 0);
        backend->close();
    }
    refused_flags = 0;
}

void without_tables(const Options& options) {
    refuse_tables = true;
    auto backend = make_ring_backend(options);
    Memory memory(kBlock * 9);
    std::string why;
    EXPECT(!backend->register_buffer(memory.address(), memory.nbytes, why) && !why.empty());
    crowd(backend);
    EXPECT(backend->report().notes["registered_files"] != "" && backend->stats().fixed == 0);
    refuse_tables = false;
}

// The ring breaks with pieces in flight, requests queued and a file open: everyone is told, nobody hangs, later calls are refused.
void broken(const Options& options) {
    auto backend = make_ring_backend(options);
    Rule slow;
    slow.kinds[1] = true;
    slow.probability = 1;
    slow.fate.delay = 200;
    backend->faults().arm({slow});
    auto file = backend->open(scratch("broken"), true, true, Direct::Auto);
    static Memory memory(kBlock * 64);  // the engine must assume that the kernel goes on using it
    std::vector<RequestPtr> writes;
    for (int i = 0; i < 4; ++i) writes.push_back(request(Kind::Write, file, 0, memory.address(), memory.nbytes));
    backend->submit(writes);
    break_ring = true;
    backend->submit({request(Kind::Read, file, 0, memory.address(), kPage)});  // wakes the reactor
    for (const auto& write : writes) EXPECT(outcome(write) == EBADF);
    bool refused = false;
    for (int i = 0; i < 1000 && !refused; ++i) {
        try {
            backend->submit({request(Kind::Write, file, 0, memory.address(), kPage)});
        } catch (const ClosedError&) {
            refused = true;
        }
    }
    EXPECT(refused);
    file->close();
    backend->close();
    EXPECT(backend->stats().in_flight() == 0);
    break_ring = false;
}

#endif

}  // namespace

#ifdef ZINF_HAVE_LIBURING

// These stand in front of liburing's own.
extern "C" {

int io_uring_queue_init_params(unsigned entries, io_uring* ring, io_uring_params* params) {
    static auto* real = reinterpret_cast<decltype(&io_uring_queue_init_params)>(dlsym(RTLD_NEXT, "io_uring_queue_init_params"));
    return params->flags & refused_flags ? -EINVAL : real(entries, ring, params);
}

int io_uring_register_files(io_uring* ring, const int* files, unsigned count) {
    static auto* real = reinterpret_cast<decltype(&io_uring_register_files)>(dlsym(RTLD_NEXT, "io_uring_register_files"));
    return refuse_tables ? -EINVAL : real(ring, files, count);
}

int io_uring_register_buffers_sparse(io_uring* ring, unsigned count) {
    static auto* real = reinterpret_cast<decltype(&io_uring_register_buffers_sparse)>(dlsym(RTLD_NEXT, "io_uring_register_buffers_sparse"));
    return refuse_tables ? -EINVAL : real(ring, count);
}

int io_uring_submit_and_wait_timeout(io_uring* ring, io_uring_cqe** cqe, unsigned count, __kernel_timespec* timeout, sigset_t* mask) {
    static auto* real = reinterpret_cast<decltype(&io_uring_submit_and_wait_timeout)>(dlsym(RTLD_NEXT, "io_uring_submit_and_wait_timeout"));
    return break_ring ? -EBADF : real(ring, cqe, count, timeout, mask);
}
}

#endif

int main() {
    const Options options{kBlock, 4, 3};
    buffers();
    for (int i = 0; i < 3; ++i) close_under_fire(make_thread_backend(options));
    crowd(make_thread_backend(options));
    std::thread patient([&] { endless_again(make_thread_backend(options)); });
#ifdef ZINF_HAVE_LIBURING
    bool ring = true;
    try {
        make_ring_backend(options)->close();
    } catch (const IoError& error) {
        std::fprintf(stderr, "io_uring not tested: %s\n", error.what());
        ring = false;
    }
    if (ring) {
        for (int i = 0; i < 3; ++i) close_under_fire(make_ring_backend(options));
        broken(options);  // these three change what every ring of the process sees
        ladder(options);
        without_tables(options);
        std::thread also([&] { endless_again(make_ring_backend(options)); });
        crowd(make_ring_backend(options));
        also.join();
    }
#endif
    patient.join();
    std::puts("ok");
    return 0;
}
