#include "dispatch.h"

#include <string>

#include "check.h"

namespace zinf::ops {
namespace {

struct Entry {
    std::string_view name;
    const Kernels* kernels;
    bool (*runs)();
};

bool always() { return true; }

// __builtin_cpu_supports asks cpuid, and xgetbv whether the operating system saves the registers.
constexpr Entry ENTRIES[] = {
    {"baseline", &baseline::kernels, always},
#if defined(__x86_64__)
    {"avx2", &avx2::kernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
    {"avx512", &avx512::kernels,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
     }},
#endif
};

}  // namespace

std::vector<std::string_view> available_isas() {
    std::vector<std::string_view> names;
    for (const Entry& entry : ENTRIES)
        if (entry.runs()) names.push_back(entry.name);
    return names;
}

const Kernels& kernels_of(std::string_view name) {
    for (const Entry& entry : ENTRIES)
        if (entry.name == name && entry.runs()) return *entry.kernels;
    std::string message = "isa: this machine cannot run '" + std::string(name) + "', it runs";
    for (std::string_view other : available_isas()) message.append(" ").append(other);
    ZINF_CHECK(false, message);
    __builtin_unreachable();
}

}  // namespace zinf::ops
