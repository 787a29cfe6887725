#include "reactor.h"

#include "backend.h"

#ifdef ZINF_HAVE_LIBURING

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "check.h"

namespace zinf::aio {
namespace {

const char* const kClosed = "the I/O engine is closed";

}  // namespace

Reactor::Reactor(const Options& options) : Backend(options), pieces_(options.queue_depth) {
    eventfd_ = ::eventfd(0, EFD_CLOEXEC);
    if (eventfd_ < 0) throw IoError(errno, "eventfd: " + errno_text(errno), "");
    for (Piece& piece : pieces_) idle_.push_back(&piece);
    std::promise<void> ready;
    auto started = ready.get_future();
    try {
        thread_ = std::thread([this, ready = std::move(ready)]() mutable { run(ready); });
        started.get();
    } catch (...) {  // no thread to be had, or no ring
        if (thread_.joinable()) thread_.join();
        ::close(eventfd_);
        throw;
    }
}

Reactor::~Reactor() {
    if (thread_.joinable()) stop();
}

// ---- other threads

void Reactor::wake() {
    const std::uint64_t one = 1;
    while (::write(eventfd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void Reactor::push(std::vector<RequestPtr>& batch) {
    std::lock_guard lock(mutex_);
    if (stopping_) throw ClosedError(broken_ ? "the I/O engine failed" : kClosed);
    inbox_.insert(inbox_.end(), batch.begin(), batch.end());
    if (!std::exchange(signalled_, true)) wake();
}

void Reactor::post(Command command) {
    std::lock_guard lock(mutex_);
    if (stopping_) throw ClosedError(kClosed);
    commands_.push_back(std::move(command));
    if (!std::exchange(signalled_, true)) wake();
}

void Reactor::call(Command command) {
    auto finished = std::make_shared<std::promise<void>>();  // shared: we may be gone while the reactor is still inside set_value()
    auto done = finished->get_future();
    post([command = std::move(command), finished] {
        command();
        finished->set_value();
    });
    done.get();
}

int Reactor::adopt(int fd) {
    int slot = -1;
    call([&] {
        if (file_slots_.empty()) return;
        if (ring_->set_file(file_slots_.back(), fd) < 0) return;
        slot = static_cast<int>(file_slots_.back());
        file_slots_.pop_back();
        ++fixed_files_;
    });
    return slot;
}

void Reactor::forget_file(int slot, bool wait) {
    auto forget = [this, slot] {
        ring_->set_file(static_cast<unsigned>(slot), -1);
        file_slots_.push_back(static_cast<unsigned>(slot));
        --fixed_files_;
    };
    try {
        wait ? call(forget) : post(forget);
    } catch (const ClosedError&) {  // the ring is gone and its table with it
    }
}

bool Reactor::register_buffer(std::uint64_t address, std::uint64_t nbytes, std::string& why) {
    why = granted_.notes.at("registered_buffers");
    if (!why.empty()) return false;
    bool ok = false;
    std::string invalid;
    call([&] {
        std::vector<BufferTable::Segment> segments;
        try {
            segments = buffers_->add(address, nbytes);
        } catch (const std::invalid_argument& error) {
            invalid = error.what();
            return;
        }
        if (segments.empty()) {
            why = "the table of registered buffers is full";
            return;
        }
        for (std::size_t i = 0; i < segments.size(); ++i) {
            const int status = ring_->set_buffer(segments[i].slot, reinterpret_cast<void*>(segments[i].begin), segments[i].end - segments[i].begin);
            if (status == 0) continue;
            why = "io_uring_register_buffers: " + errno_text(-status) + (status == -ENOMEM ? " (RLIMIT_MEMLOCK too small, see ulimit -l)" : "");
            for (std::size_t k = 0; k < i; ++k) ring_->set_buffer(segments[k].slot, nullptr, 0);
            buffers_->remove(address);
            return;
        }
        registered_bytes_ = buffers_->registered_bytes();
        registered_ranges_ = buffers_->ranges();
        ok = true;
    });
    ZINF_CHECK(invalid.empty(), invalid);
    return ok;
}

void Reactor::unregister_buffer(std::uint64_t address) {
    try {
        call([&] {
            for (const auto& segment : buffers_->remove(address)) ring_->set_buffer(segment.slot, nullptr, 0);
            registered_bytes_ = buffers_->registered_bytes();
            registered_ranges_ = buffers_->ranges();
        });
    } catch (const ClosedError&) {  // nothing is registered any more
    }
}

Report Reactor::report() {
    Report report = granted_;
    report.numbers["registered_ranges"] = registered_ranges_;
    report.numbers["registered_bytes"] = registered_bytes_;
    report.numbers["fixed_files"] = fixed_files_;
    return report;
}

void Reactor::stop() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        if (!std::exchange(signalled_, true)) wake();
    }
    thread_.join();
    ::close(eventfd_);  // nobody wakes a reactor that is stopping
}

// ---- the reactor thread

void Reactor::run(std::promise<void>& ready) {
    pthread_setname_np(pthread_self(), "zinf-io");
    try {
        ring_ = std::make_unique<Ring>(options_.queue_depth + 8);  // a few more than pieces: the eventfd read, timeouts
    } catch (...) {
        ready.set_exception(std::current_exception());
        return;
    }
    buffers_ = std::make_unique<BufferTable>(ring_->buffer_slots);
    for (unsigned slot = ring_->file_slots; slot > 0; --slot) file_slots_.push_back(slot - 1);
    granted_.setup_flags = ring_->flags;
    granted_.numbers = {{"sq_entries", ring_->sq_entries}, {"cq_entries", ring_->cq_entries}, {"features", ring_->features}};
    granted_.notes = {{"registered_files", ring_->why_no_files}, {"registered_buffers", ring_->why_no_buffers}};
    ready.set_value();
    loop();
    ring_.reset();  // on this thread: it is the only one allowed to
}

void Reactor::loop() {
    arm_wake();
    while (true) {
        const bool more = drain();
        unpark();
        issue();
        if (!more && idle_.size() == pieces_.size()) return;
        const int status = ring_->submit_and_wait(patience());
        if (status < 0 && status != -EINTR && status != -ETIME && status != -EAGAIN && status != -EBUSY) return abandon(-status);
        ring_->reap([this](std::uint64_t data, int result) {
            if (data == reinterpret_cast<std::uint64_t>(&wake_count_))
                arm_wake();
            else
                finish(*reinterpret_cast<Piece*>(data), result);
        });
    }
}

void Reactor::arm_wake() {
    io_uring_sqe* sqe = ring_->sqe();
    io_uring_prep_read(sqe, eventfd_, &wake_count_, sizeof wake_count_, 0);
    sqe->user_data = reinterpret_cast<std::uint64_t>(&wake_count_);
}

bool Reactor::drain() {
    std::vector<RequestPtr> requests;
    std::vector<Command> commands;
    bool stopping;
    {
        std::lock_guard lock(mutex_);
        requests.swap(inbox_);
        commands.swap(commands_);
        stopping = stopping_;
        signalled_ = false;  // at worst one wake too many: whoever comes after this writes the eventfd again
    }
    for (auto& command : commands) command();
    for (auto& request : requests) queue_.push(std::move(request));
    return !stopping;
}

void Reactor::issue() {
    while (!idle_.empty()) {
        Piece& piece = *idle_.back();
        if (!queue_.cut(piece, options_.block_size, stats_, [this](std::uint64_t address) { return buffers_->bound(address); })) return;
        idle_.pop_back();
        start(piece);
    }
}

// A piece passes here each time it is about to be handed to the ring; one that a fault delays passes twice, and is asked about once.
void Reactor::start(Piece& piece) {
    if (!piece.decided) {
        piece.fate = faults_.decide(piece.request->kind, piece.request->path());
        piece.decided = true;
        if (piece.fate.delay) return park(piece, std::chrono::milliseconds(piece.fate.delay));
    }
    prepare(piece);
}

void Reactor::prepare(Piece& piece) {
    const Request& request = *piece.request;
    const File& file = request.file();
    const int fd = file.slot() >= 0 ? file.slot() : file.fd();
    const bool read = request.kind == Kind::Read;
    const auto address = reinterpret_cast<void*>(piece.address());
    const auto length = static_cast<unsigned>(piece.span());  // at most block_size
    const auto* segment = buffers_->find(piece.address());
    io_uring_sqe* sqe = ring_->sqe();
    if (piece.fate.error) {
        io_uring_prep_nop(sqe);
    } else if (request.kind == Kind::Datasync) {
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
    } else if (segment && piece.address() + length <= segment->end) {
        const int slot = static_cast<int>(segment->slot);
        read ? io_uring_prep_read_fixed(sqe, fd, address, length, piece.offset(), slot) : io_uring_prep_write_fixed(sqe, fd, address, length, piece.offset(), slot);
        stats_.fixed.fetch_add(1, std::memory_order_relaxed);
    } else {
        read ? io_uring_prep_read(sqe, fd, address, length, piece.offset()) : io_uring_prep_write(sqe, fd, address, length, piece.offset());
    }
    if (file.slot() >= 0 && !piece.fate.error) sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = reinterpret_cast<std::uint64_t>(&piece);
}

void Reactor::finish(Piece& piece, int result) {
    if (piece.fate.error) result = -piece.fate.error;
    const Verdict verdict = examine(piece, result, stats_);
    piece.decided = false;
    if (verdict == Verdict::Retry && piece.backoff().count()) return park(piece, piece.backoff());
    if (verdict == Verdict::Retry || verdict == Verdict::Short) return start(piece);
    Queue::settle(piece, stats_);
    idle_.push_back(&piece);
}

void Reactor::park(Piece& piece, Clock::duration delay) { parked_.emplace(Clock::now() + delay, &piece); }

void Reactor::unpark() {
    const auto now = Clock::now();
    while (!parked_.empty() && parked_.begin()->first <= now) {
        Piece& piece = *parked_.begin()->second;
        parked_.erase(parked_.begin());
        start(piece);
    }
}

// The ring itself broke (it never should). Nobody can tell what the kernel still writes to, so the memory of pieces in flight is never freed.
void Reactor::abandon(int code) {
    std::vector<RequestPtr> waiting;
    std::vector<Command> commands;
    {
        std::lock_guard lock(mutex_);
        stopping_ = broken_ = true;
        waiting.swap(inbox_);
        commands.swap(commands_);
    }
    for (auto& command : commands) command();  // whatever they ask of the ring now fails, and their callers wake
    for (auto& request : waiting) queue_.push(std::move(request));
    const std::string why = ": the ring failed: " + errno_text(code);
    for (Piece& piece : pieces_) {
        if (!piece.request) continue;
        piece.request->fail(code, piece.request->describe() + why);
        piece.request->keep_owner_forever();
        Queue::settle(piece, stats_);
    }
    queue_.fail_all(code, why, stats_);
}

std::optional<std::chrono::nanoseconds> Reactor::patience() const {
    if (parked_.empty()) return std::nullopt;
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(parked_.begin()->first - Clock::now());
    return std::max(left, std::chrono::nanoseconds(0));
}

std::shared_ptr<Backend> make_ring_backend(const Options& options) { return std::make_shared<Reactor>(options); }
bool built_with_liburing() { return true; }

}  // namespace zinf::aio

#else

#include <cerrno>

namespace zinf::aio {

std::shared_ptr<Backend> make_ring_backend(const Options&) { throw IoError(ENOSYS, "zinf was built without liburing", ""); }
bool built_with_liburing() { return false; }

}  // namespace zinf::aio

#endif
