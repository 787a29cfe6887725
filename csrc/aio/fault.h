// Faults on demand, for tests: armed rules decide, just before a piece is handed to the kernel, what will become of it.
// The hook stands below the examination of completions, so the paths for retry, short and error that run are the real ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace zinf::aio {

enum class Kind : std::uint8_t { Read, Write, Datasync };

// What happens to one piece. All zero: nothing unusual.
struct Fate {
    int error = 0;            // errno instead of I/O
    std::uint64_t limit = 0;  // bytes: transfer only so many (rounded to whole pages with O_DIRECT)
    std::uint32_t delay = 0;  // milliseconds before it is handed to the kernel
};

struct Rule {
    bool kinds[3] = {false, false, false};  // by Kind
    std::string path;                       // substring of the path, empty: every file
    std::uint64_t nth = 0;                  // fires on this match, counted from 1; 0: by probability
    double probability = 0;
    std::uint64_t seed = 0;
    std::uint64_t times = 0;  // fires at most so often; 0: no limit
    Fate fate;
    std::uint64_t seen = 0;   // matches so far
    std::uint64_t fired = 0;
};

class Faults {
public:
    void arm(std::vector<Rule> rules);  // replaces what was armed
    std::vector<std::uint64_t> fired() const;
    Fate decide(Kind kind, const std::string& path);  // the first rule that fires wins; later ones still count the match

private:
    std::atomic<bool> armed_{false};
    mutable std::mutex mutex_;
    std::vector<Rule> rules_;
};

}  // namespace zinf::aio
