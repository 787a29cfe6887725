#include "fault.h"

namespace zinf::aio {
namespace {

// splitmix64 of (seed, index) as a double in [0, 1): zinf/aio/faults.py computes the same, so a seed means the same storm everywhere.
double uniform(std::uint64_t seed, std::uint64_t index) {
    std::uint64_t z = seed + index * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    return static_cast<double>(z >> 11) * 0x1.0p-53;
}

}  // namespace

void Faults::arm(std::vector<Rule> rules) {
    std::lock_guard lock(mutex_);
    rules_ = std::move(rules);
    armed_.store(!rules_.empty());
}

std::vector<std::uint64_t> Faults::fired() const {
    std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> counts;
    for (const Rule& rule : rules_) counts.push_back(rule.fired);
    return counts;
}

Fate Faults::decide(Kind kind, const std::string& path) {
    if (!armed_.load(std::memory_order_relaxed)) [[likely]]
        return {};
    std::lock_guard lock(mutex_);
    const Rule* chosen = nullptr;
    for (Rule& rule : rules_) {
        if (!rule.kinds[static_cast<int>(kind)] || path.find(rule.path) == std::string::npos) continue;
        ++rule.seen;
        const bool hit = rule.nth ? rule.seen == rule.nth : uniform(rule.seed, rule.seen) < rule.probability;
        if (!hit || chosen || (rule.times && rule.fired >= rule.times)) continue;
        ++rule.fired;
        chosen = &rule;
    }
    return chosen ? chosen->fate : Fate{};
}

}  // namespace zinf::aio
