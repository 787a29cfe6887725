// The kernels as tables of function pointers, one table for each instruction set, chosen at run time.
//
// Words: a kernel works on elements [begin, end) of flat arrays. `Dtype` is the storage of an array of floats.
// All tables hold the same algorithms (the .inl files), so all of them give the same bits; see half.h for NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace zinf::ops {

enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2, DTYPES = 3 };

// Elements in one unit of work of a thread. Fixed, never n / threads, and a multiple of SUM_PIECE.
inline constexpr std::size_t PIECE = 64 * 1024;
// Elements in one partial sum of squares: part of the result's definition (zinf/ops/reference.py).
inline constexpr std::size_t SUM_PIECE = 2048;

// The rules of rules.inl, by their numbers in zinf/ops/__init__.py.
enum Rule : int { ADAM = 0, ADAMW = 1, SGD = 2, MOMENTUM = 3, NESTEROV = 4, LION = 5, ADAGRAD = 6, RULES = 7 };
inline constexpr std::size_t MAX_SCALARS = 9;

// One step of an optimizer. `rest` is what the weights' dtype needs beside them: lo (int16) for bf16, the fp32 master for fp16, nothing for fp32.
// The scalars are computed in double by the caller (zinf/ops/reference.py) and rounded once.
struct Step {
    void* weights;
    void* rest;
    float* moments[2];
    float* ema;  // an average of the weights, or null
    const void* grads;
    float scalars[MAX_SCALARS];  // the rule's, in its order
    float most;                  // elements of the scaled gradient are clipped to [-most, most]
    float keep, take;            // of the average
    bool fresh;                  // the average begins with this step
};

using StepFn = void (*)(const Step&, std::size_t begin, std::size_t end);
using SumFn = void (*)(const void* x, std::size_t begin, std::size_t end, double* partials);  // begin % SUM_PIECE == 0
using CastFn = void (*)(const void* src, void* dst, std::size_t begin, std::size_t end);
using AccumulateFn = void (*)(void* dst, const void* src, float scale, std::size_t begin, std::size_t end);
using SplitFn = void (*)(const float* src, std::uint16_t* hi, std::int16_t* lo, std::size_t begin, std::size_t end);
using JoinFn = void (*)(const std::uint16_t* hi, const std::int16_t* lo, float* dst, std::size_t begin, std::size_t end);
using CopyFn = void (*)(const char* src, char* dst, std::size_t bytes);

struct RuleKernels {
    std::size_t scalars;                 // how many the rule has
    int moments;                         // planes that it keeps
    StepFn step[DTYPES][DTYPES][2];      // [weights][grads][with an average]
};

struct Kernels {
    RuleKernels rules[RULES];
    SumFn sum_squares[DTYPES];
    CastFn cast[DTYPES][DTYPES];              // [src][dst]
    AccumulateFn accumulate[DTYPES][DTYPES];  // [dst][src]
    SplitFn split;
    JoinFn join;
    CopyFn copy;  // with non-temporal stores: what a bench takes as the speed of memory
};

namespace baseline {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

// Names that this processor and its operating system run, from plain to best.
std::vector<std::string_view> available_isas();
// The table of a name; std::invalid_argument if this machine cannot run it.
const Kernels& kernels_of(std::string_view name);

}  // namespace zinf::ops
