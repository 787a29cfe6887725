#include "file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>

#include "error.h"

namespace zinf::aio {
namespace {

int open_retrying(const std::string& path, int flags) {
    int fd;
    do {
        fd = ::open(path.c_str(), flags, 0600);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

// Newer kernels let tmpfs be opened with O_DIRECT and then ignore it; there the flag only brings its alignment rules.
bool lives_in_memory(int fd) {
    struct statfs fs;
    return ::fstatfs(fd, &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

}  // namespace

std::shared_ptr<File> File::open(const std::string& path, bool write, bool create, Direct direct) {
    const int flags = O_CLOEXEC | O_NOFOLLOW | (write ? O_RDWR : O_RDONLY) | (create ? O_CREAT : 0);
    std::string note;
    int fd = -1;
    if (direct != Direct::Off) {
        fd = open_retrying(path, flags | O_DIRECT);
        if (fd >= 0 && lives_in_memory(fd)) {
            ::close(fd);
            fd = -1;
            errno = EINVAL;
            note = "the filesystem is in memory";
        } else if (fd < 0 && errno == EINVAL) {
            note = "the filesystem refuses O_DIRECT";
        }
        if (fd < 0 && (errno != EINVAL || direct == Direct::Require)) {
            const int code = errno;
            throw IoError(code, note.empty() ? errno_text(code) : "open with O_DIRECT: " + note, path);
        }
    }
    const bool is_direct = fd >= 0;
    if (!is_direct) fd = open_retrying(path, flags);
    if (fd < 0) throw IoError(errno, errno_text(errno), path);
    return std::shared_ptr<File>(new File(path, fd, write, is_direct, note));
}

File::File(std::string path_, int fd, bool writable_, bool direct_, std::string note_)
    : path(std::move(path_)), writable(writable_), direct(direct_), note(std::move(note_)), fd_(fd) {}

// Runs on whichever thread drops the last reference, the reactor's included: so it must not wait for the reactor.
File::~File() { close_descriptor(/*wait=*/false); }

void File::attach(std::weak_ptr<FileTable> table, int slot) {
    table_ = std::move(table);
    slot_ = slot;
}

bool File::acquire() {
    std::lock_guard lock(mutex_);
    if (closing_) return false;
    ++in_flight_;
    return true;
}

void File::release() {
    std::lock_guard lock(mutex_);
    if (--in_flight_ == 0) idle_.notify_all();  // under the lock: the waiter may destroy us as soon as it can take it
}

void File::close() {
    std::unique_lock lock(mutex_);
    closing_ = true;
    idle_.wait(lock, [this] { return in_flight_ == 0; });
    close_descriptor(/*wait=*/true);  // under the lock: a second closer returns only when the descriptor is gone
}

void File::close_descriptor(bool wait) {
    if (fd_ < 0) return;
    if (slot_ >= 0) {
        if (auto table = table_.lock()) table->forget_file(slot_, wait);
    }
    ::close(fd_);  // on Linux the descriptor is gone whatever close() returns; durability is datasync's job
    fd_ = -1;
    slot_ = -1;
}

}  // namespace zinf::aio
