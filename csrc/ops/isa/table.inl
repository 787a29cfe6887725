// The table of one instruction set. Included last in its namespace.

// clang-format off
#define ZINF_WITH_GRADS(R, W, G) {step<R, W, G, false>, step<R, W, G, true>}
#define ZINF_WITH_WEIGHTS(R, W) {ZINF_WITH_GRADS(R, W, BF16), ZINF_WITH_GRADS(R, W, FP16), ZINF_WITH_GRADS(R, W, FP32)}
#define ZINF_RULE(R) {sizeof(R) / sizeof(float), R::MOMENTS, {ZINF_WITH_WEIGHTS(R, BF16), ZINF_WITH_WEIGHTS(R, FP16), ZINF_WITH_WEIGHTS(R, FP32)}}
constinit const Kernels kernels = {
    {ZINF_RULE(Adam<false>), ZINF_RULE(Adam<true>), ZINF_RULE(Sgd), ZINF_RULE(Momentum<false>), ZINF_RULE(Momentum<true>), ZINF_RULE(Lion), ZINF_RULE(Adagrad)},
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
#undef ZINF_RULE
#undef ZINF_WITH_WEIGHTS
#undef ZINF_WITH_GRADS
// clang-format on
