// The table of one instruction set. Included last in its namespace.

// clang-format off
#define ZINF_ADAM(W, G) {adam<W, G, false>, adam<W, G, true>}
constinit const Kernels kernels = {
    {{ZINF_ADAM(BF16, BF16), ZINF_ADAM(BF16, FP16), ZINF_ADAM(BF16, FP32)},
     {ZINF_ADAM(FP16, BF16), ZINF_ADAM(FP16, FP16), ZINF_ADAM(FP16, FP32)},
     {ZINF_ADAM(FP32, BF16), ZINF_ADAM(FP32, FP16), ZINF_ADAM(FP32, FP32)}},
    {sum_squares<BF16>, sum_squares<FP16>, sum_squares<FP32>},
    {{cast<BF16, BF16>, cast<BF16, FP16>, cast<BF16, FP32>},
     {cast<FP16, BF16>, cast<FP16, FP16>, cast<FP16, FP32>},
     {cast<FP32, BF16>, cast<FP32, FP16>, cast<FP32, FP32>}},
    {{accumulate<BF16, BF16>, accumulate<BF16, FP16>, accumulate<BF16, FP32>},
     {accumulate<FP16, BF16>, accumulate<FP16, FP16>, accumulate<FP16, FP32>},
     {accumulate<FP32, BF16>, accumulate<FP32, FP16>, accumulate<FP32, FP32>}},
    split,
    join,
    copy,
};
#undef ZINF_ADAM
// clang-format on
