// Sums of squares in double. The square of an fp32 is exact in double and the sum of 2^64 of them cannot overflow, so the result is
// finite exactly if all of the input is.

// [Note: the order of the sum] Element i of a piece of SUM_PIECE elements is added to lane i % LANES; then lane j + half is added to lane j, halving
// until one is left. What vector registers there are, how many threads, and where a tensor is cut (at multiples of SUM_PIECE) does not enter.
inline constexpr std::size_t LANES = 32;

template <Dtype D> inline void add_squares(double* __restrict lanes, const stored<D>* __restrict x, std::size_t n) {
    std::size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (std::size_t j = 0; j < LANES; ++j) {
            const double value = load<D>(x[i + j]);
            lanes[j] += value * value;
        }
    for (std::size_t j = 0; i + j < n; ++j) {
        const double value = load<D>(x[i + j]);
        lanes[j] += value * value;
    }
}

template <Dtype D> inline double sum_piece(const stored<D>* x, std::size_t n) {
    static_assert(SUM_PIECE % BLOCK == 0 && BLOCK % LANES == 0);
    double lanes[LANES] = {};
    for (std::size_t i = 0; i < n; i += BLOCK) {
        const std::size_t m = block_at(i, n);
        prefetch(x + i, 8192 / sizeof(stored<D>));  // one stream alone wants more in flight
        if constexpr (D == FP16) {
            float wide[BLOCK];
            from_fp16(x + i, wide, m);
            add_squares<FP32>(lanes, wide, m);
        } else {
            add_squares<D>(lanes, x + i, m);
        }
    }
    for (std::size_t half = LANES / 2; half; half /= 2)
        for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// partials[k] of piece k, for the pieces that begin in [begin, end).
template <Dtype D> void sum_squares(const void* x, std::size_t begin, std::size_t end, double* partials) {
    for (std::size_t i = begin; i < end; i += SUM_PIECE) {
        const std::size_t n = end - i < SUM_PIECE ? end - i : SUM_PIECE;
        partials[i / SUM_PIECE] = sum_piece<D>(static_cast<const stored<D>*>(x) + i, n);
    }
}
