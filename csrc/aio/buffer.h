// Two kinds of ownership of memory: which ranges the ring knows as fixed buffers, and which Python objects keep ranges alive.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace zinf::aio {

// Registered ranges -> slots of the ring's table. Owned by the reactor thread.
// [Note: segments] The kernel takes at most 1 GiB in one slot, so a range is a row of segments and no piece may cross from one to the next.
class BufferTable {
public:
    struct Segment {
        std::uint64_t begin, end;  // addresses
        unsigned slot;
    };

    explicit BufferTable(unsigned slots);
    // Takes slots for a new range; empty if there are not enough. Throws std::invalid_argument if it overlaps another.
    std::vector<Segment> add(std::uint64_t address, std::uint64_t nbytes);
    // The segments of the range that starts at `address` (none: not registered); their slots are free again.
    std::vector<Segment> remove(std::uint64_t address);
    const Segment* find(std::uint64_t address) const;
    // Bytes from `address` that one piece may cover: to the end of its segment, or to where the next one begins.
    std::uint64_t bound(std::uint64_t address) const;
    std::uint64_t registered_bytes() const { return bytes_; }
    std::size_t ranges() const { return ranges_.size(); }

private:
    std::vector<unsigned> free_;
    std::map<std::uint64_t, std::uint64_t> ranges_;   // address -> bytes
    std::map<std::uint64_t, Segment> segments_;       // by begin
    std::uint64_t bytes_ = 0;
};

// An opaque owner of memory in flight: calls `drop(object)` when the last request that holds it is complete, from any thread.
std::shared_ptr<void> make_owner(void* object, void (*drop)(void*));

}  // namespace zinf::aio
