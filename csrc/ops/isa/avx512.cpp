// AVX-512 as of Skylake-SP: F, BW, VL, DQ.
#if defined(__x86_64__)
// Every standard header comes before the region, so no library function is compiled for an instruction set the machine may lack.
#include <cstddef>
#include <cstdint>
#include <immintrin.h>

#include "../dispatch.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#define ZINF_HALF 3

namespace zinf::ops::avx512 {
#include "../half.h"
#include "../split.inl"
#include "../rules.inl"
#include "../step.inl"
#include "../reduce.inl"
#include "../cast.inl"
#include "table.inl"
}  // namespace zinf::ops::avx512

#pragma GCC pop_options
#endif
