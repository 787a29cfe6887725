// What every processor of the architecture runs: SSE2 on x86-64, NEON on aarch64.
// Every standard header comes before the region, so no library function is compiled for an instruction set the machine may lack.
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../dispatch.h"

#define ZINF_HALF 0

namespace zinf::ops::baseline {
#include "../half.h"
#include "../split.inl"
#include "../rules.inl"
#include "../step.inl"
#include "../reduce.inl"
#include "../cast.inl"
#include "table.inl"
}  // namespace zinf::ops::baseline
