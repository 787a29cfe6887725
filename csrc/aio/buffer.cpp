#include "buffer.h"

#include "check.h"

namespace zinf::aio {
namespace {

constexpr std::uint64_t kSegment = std::uint64_t{1} << 30;

}  // namespace

BufferTable::BufferTable(unsigned slots) {
    for (unsigned slot = slots; slot > 0; --slot) free_.push_back(slot - 1);
}

std::vector<BufferTable::Segment> BufferTable::add(std::uint64_t address, std::uint64_t nbytes) {
    ZINF_CHECK(nbytes > 0 && address + nbytes > address, "register: an empty or impossible range of " + std::to_string(nbytes) + " bytes");
    auto next = ranges_.lower_bound(address);
    const bool after = next == ranges_.end() || address + nbytes <= next->first;
    const bool before = next == ranges_.begin() || std::prev(next)->first + std::prev(next)->second <= address;
    ZINF_CHECK(after && before, "register: the range overlaps one that is registered already");
    std::vector<Segment> added;
    if ((nbytes + kSegment - 1) / kSegment > free_.size()) return added;
    for (std::uint64_t at = address; at < address + nbytes; at += kSegment) {
        const Segment segment{at, std::min(at + kSegment, address + nbytes), free_.back()};
        free_.pop_back();
        segments_.emplace(at, segment);
        added.push_back(segment);
    }
    ranges_.emplace(address, nbytes);
    bytes_ += nbytes;
    return added;
}

std::vector<BufferTable::Segment> BufferTable::remove(std::uint64_t address) {
    std::vector<Segment> removed;
    auto range = ranges_.find(address);
    if (range == ranges_.end()) return removed;
    const std::uint64_t end = address + range->second;
    for (auto it = segments_.find(address); it != segments_.end() && it->first < end; it = segments_.erase(it)) {
        removed.push_back(it->second);
        free_.push_back(it->second.slot);
    }
    bytes_ -= range->second;
    ranges_.erase(range);
    return removed;
}

const BufferTable::Segment* BufferTable::find(std::uint64_t address) const {
    auto it = segments_.upper_bound(address);
    if (it == segments_.begin()) return nullptr;
    --it;
    return address < it->second.end ? &it->second : nullptr;
}

std::uint64_t BufferTable::bound(std::uint64_t address) const {
    if (const Segment* segment = find(address)) return segment->end - address;
    auto next = segments_.upper_bound(address);
    return next == segments_.end() ? std::numeric_limits<std::uint64_t>::max() : next->first - address;
}

std::shared_ptr<void> make_owner(void* object, void (*drop)(void*)) { return std::shared_ptr<void>(object, drop); }

}  // namespace zinf::aio
