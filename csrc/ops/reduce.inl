// Sums of squares in double. The square of an fp32 is exact in double and the sum of 2^64 of them cannot overflow, so the result is
// finite exactly if all of the input is.

// [Note: the order of the sum] Element i of a piece of SUM_PIECE elements is added to lane i % LANES; then lane j + half is added to lane j, halving
// until one is left. What vector registers there are, how many threads, and where a tensor is cut (at multiples of SUM_PIECE) does not enter.
inline constexpr std::size_t LANES = 32;

template <Dtype D> inline double sum_piece(const stored<D>* __restrict x, std::size_t n) {
    double lanes[LANES] = {};
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
    for (std::size_t half = LANES / 2; half; half /= 2)
        for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// partials[k] of piece k, for the pieces that begin in [begin, end).
template <Dtype D> void sum_squares(const void* x, std::size_t begin, std::size_t end, double* partials) {
    for (std::size_t i = begin; i < end; i += SUM_PIECE) {
        const std::size_t n = end - i < SUM_PIECE ? end - i : SUM_PIECE;
        const stored<D>* piece = static_cast<const stored<D>*>(x) + i;
        if constexpr (D == FP16) {
            float wide[SUM_PIECE];
            from_fp16(piece, wide, n);
            partials[i / SUM_PIECE] = sum_piece<FP32>(wide, n);
        } else {
            partials[i / SUM_PIECE] = sum_piece<D>(piece, n);
        }
    }
}
