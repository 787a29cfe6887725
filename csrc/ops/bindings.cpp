// The module zinf._ops: addresses, counts and scalars come in as numbers; what they mean was checked in zinf/ops/__init__.py.
// No kernel touches a Python object, and each call releases the GIL on its binding line.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "pool.h"

namespace py = pybind11;

namespace zinf::ops {
namespace {

using Address = std::uintptr_t;
using Released = py::call_guard<py::gil_scoped_release>;

template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }

Dtype dtype(int code) {
    ZINF_CHECK(code >= 0 && code < DTYPES, "no dtype has the number " + std::to_string(code));
    return static_cast<Dtype>(code);
}

std::size_t itemsize(Dtype d) { return d == FP32 ? 4 : 2; }

struct Array {
    const char* name;
    Address address;
    std::size_t itemsize;
};

// Arrays of n elements: none may share memory with another.
void check_disjoint(std::size_t n, const std::vector<Array>& arrays) {
    for (const Array& a : arrays)
        for (const Array& b : arrays)
            ZINF_CHECK(&a == &b || a.address >= b.address + n * b.itemsize || b.address >= a.address + n * a.itemsize,
                       std::string(a.name) + ": shares memory with " + b.name);
}

// f(begin, end) over the pieces of [0, n), on the pool or (null) on the caller.
template <class F> void for_ranges(Pool* pool, std::size_t n, std::size_t piece, F f) {
    auto body = [&](std::size_t k) noexcept {
        const std::size_t begin = k * piece;
        f(begin, n - begin < piece ? n : begin + piece);
    };
    const std::size_t pieces = n / piece + (n % piece != 0);
    if (pool) return pool->for_each(pieces, body);
    run_alone(pieces, [](void* context, std::size_t k) noexcept { (*static_cast<decltype(body)*>(context))(k); }, &body);
}

// `moments` and `scalars` as the rule wants them; ema 0: no average, else `average` is {keep, take, fresh}.
void step(const std::string& isa, Pool* pool, std::size_t n, int rule_code, int weights_dtype, int grads_dtype, Address weights, Address rest,
          const std::vector<Address>& moments, Address ema, Address grads, const std::vector<double>& scalars, double most,
          const std::vector<double>& average) {
    const Dtype w = dtype(weights_dtype), g = dtype(grads_dtype);
    ZINF_CHECK(rule_code >= 0 && rule_code < RULES, "no rule has the number " + std::to_string(rule_code));
    const RuleKernels& rule = kernels_of(isa).rules[rule_code];
    const StepFn kernel = rule.step[w][g][ema != 0];
    ZINF_CHECK(scalars.size() == rule.scalars, "step: expected " + std::to_string(rule.scalars) + " scalars");
    ZINF_CHECK(moments.size() == static_cast<std::size_t>(rule.moments), "step: expected " + std::to_string(rule.moments) + " moments");
    ZINF_CHECK(ema == 0 || average.size() == 3, "step: expected 3 numbers for the average");
    Step a{at<void>(weights), at<void>(rest), {}, at<float>(ema), at<void>(grads), {}, static_cast<float>(most), 0, 0, false};
    std::vector<Array> arrays{{"weights", weights, itemsize(w)}, {"grads", grads, itemsize(g)}};
    if (w != FP32) arrays.push_back(w == BF16 ? Array{"state: lo", rest, 2} : Array{"state: master", rest, 4});
    for (std::size_t k = 0; k < moments.size(); ++k) {
        a.moments[k] = at<float>(moments[k]);
        arrays.push_back({rule_code == ADAGRAD ? "state: s" : k == 0 ? "state: m" : "state: v", moments[k], 4});
    }
    if (ema) {
        arrays.push_back({"ema", ema, 4});
        a.keep = static_cast<float>(average[0]), a.take = static_cast<float>(average[1]), a.fresh = average[2] != 0;
    }
    check_disjoint(n, arrays);
    for (std::size_t k = 0; k < scalars.size(); ++k) a.scalars[k] = static_cast<float>(scalars[k]);  // rounded once, to nearest
    for_ranges(pool, n, PIECE, [&](std::size_t begin, std::size_t end) { kernel(a, begin, end); });
}

double sum_squares(const std::string& isa, Pool* pool, std::size_t n, int x_dtype, Address x, double initial) {
    const SumFn kernel = kernels_of(isa).sum_squares[dtype(x_dtype)];
    std::vector<double> partials(n / SUM_PIECE + (n % SUM_PIECE != 0));
    for_ranges(pool, n, PIECE, [&](std::size_t begin, std::size_t end) { kernel(at<void>(x), begin, end, partials.data()); });
    for (double partial : partials) initial += partial;  // in order: see [Note: the order of the sum]
    return initial;
}

void cast(const std::string& isa, Pool* pool, std::size_t n, int src_dtype, int dst_dtype, Address src, Address dst) {
    const Dtype s = dtype(src_dtype), d = dtype(dst_dtype);
    const CastFn kernel = kernels_of(isa).cast[s][d];
    check_disjoint(n, {{"dst", dst, itemsize(d)}, {"src", src, itemsize(s)}});
    for_ranges(pool, n, PIECE, [&](std::size_t begin, std::size_t end) { kernel(at<void>(src), at<void>(dst), begin, end); });
}

void accumulate(const std::string& isa, Pool* pool, std::size_t n, int dst_dtype, int src_dtype, Address dst, Address src, double scale) {
    const Dtype d = dtype(dst_dtype), s = dtype(src_dtype);
    const AccumulateFn kernel = kernels_of(isa).accumulate[d][s];
    check_disjoint(n, {{"dst", dst, itemsize(d)}, {"src", src, itemsize(s)}});
    const float factor = static_cast<float>(scale);
    for_ranges(pool, n, PIECE, [&](std::size_t begin, std::size_t end) { kernel(at<void>(dst), at<void>(src), factor, begin, end); });
}

void split(const std::string& isa, Pool* pool, std::size_t n, Address src, Address hi, Address lo) {
    const SplitFn kernel = kernels_of(isa).split;
    check_disjoint(n, {{"src", src, 4}, {"hi", hi, 2}, {"lo", lo, 2}});
    for_ranges(pool, n, PIECE, [&](std::size_t begin, std::size_t end) { kernel(at<float>(src), at<std::uint16_t>(hi), at<std::int16_t>(lo), begin, end); });
}

void join(const std::string& isa, Pool* pool, std::size_t n, Address hi, Address lo, Address dst) {
    const JoinFn kernel = kernels_of(isa).join;
    check_disjoint(n, {{"dst", dst, 4}, {"hi", hi, 2}, {"lo", lo, 2}});
    for_ranges(pool, n, PIECE, [&](std::size_t begin, std::size_t end) { kernel(at<std::uint16_t>(hi), at<std::int16_t>(lo), at<float>(dst), begin, end); });
}

void copy(const std::string& isa, Pool* pool, std::size_t bytes, Address src, Address dst) {
    const CopyFn kernel = kernels_of(isa).copy;
    for_ranges(pool, bytes, 4 * PIECE, [&](std::size_t begin, std::size_t end) { kernel(at<char>(src) + begin, at<char>(dst) + begin, end - begin); });
}

}  // namespace
}  // namespace zinf::ops

PYBIND11_MODULE(_ops, module) {
    using namespace zinf::ops;
    module.doc() = "CPU kernels of zinf, by address. Use zinf.ops, which checks what is passed.";
    module.attr("PIECE") = PIECE;
    module.attr("SUM_PIECE") = SUM_PIECE;

    py::class_<Pool>(module, "Pool")
        .def(py::init<int, const std::vector<int>&>(), py::arg("threads"), py::arg("affinity"), Released())
        .def_property_readonly("threads", &Pool::threads)
        .def("close", &Pool::close, Released());

    module.def("available_isas", &available_isas);
    module.def("step", &step, Released());
    module.def("sum_squares", &sum_squares, Released());
    module.def("cast", &cast, Released());
    module.def("accumulate", &accumulate, Released());
    module.def("split", &split, Released());
    module.def("join", &join, Released());
    module.def("copy", &copy, Released());
}
