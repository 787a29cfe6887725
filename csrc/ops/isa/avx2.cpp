// AVX2 with F16C. No FMA: a fused multiply-add rounds once where the other instruction sets round twice.
#if defined(__x86_64__)
// Every standard header comes before the region, so no library function is compiled for an instruction set the machine may lack.
#include <cstddef>
#include <cstdint>
#include <immintrin.h>

#include "../dispatch.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define ZINF_HALF 2

namespace zinf::ops::avx2 {
#include "../half.h"
#include "../split.inl"
#include "../rules.inl"
#include "../step.inl"
#include "../reduce.inl"
#include "../cast.inl"
#include "table.inl"
}  // namespace zinf::ops::avx2

#pragma GCC pop_options
#endif
