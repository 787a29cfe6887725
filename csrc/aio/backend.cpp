#include "backend.h"

#include <algorithm>

namespace zinf::aio {

void Backend::check_open() const {
    if (closing_) throw ClosedError("the I/O engine is closed");
}

std::shared_ptr<File> Backend::open(const std::string& path, bool write, bool create, Direct direct) {
    auto file = File::open(path, write, create, direct);
    const int slot = adopt(file->fd());
    file->attach(weak_from_this(), slot);
    std::lock_guard lock(mutex_);
    check_open();
    std::erase_if(files_, [](const std::weak_ptr<File>& known) { return known.expired(); });
    files_.push_back(file);
    return file;
}

void Backend::submit(std::vector<RequestPtr> batch) {
    stats_.begin(batch.size());
    try {
        push(batch);
    } catch (...) {
        for (std::size_t i = 0; i < batch.size(); ++i) stats_.end();
        throw;
    }
}

void Backend::close() {
    std::lock_guard one(stopping_);
    if (stopped_) return;
    std::vector<std::weak_ptr<File>> files;
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
        files.swap(files_);
    }
    for (auto& known : files) {
        if (auto file = known.lock()) file->close();
    }
    stop();
    stopped_ = true;
}

}  // namespace zinf::aio
