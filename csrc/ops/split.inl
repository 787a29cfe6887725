// The fp32 master of bf16 weights in two halves.

// [Note: the split master] The bits b of an fp32 weight are kept as hi = (b + 0x8000) >> 16, a bf16, and lo = int16(b - (hi << 16)),
// all modulo 2^32. So (hi << 16) + lo is b again for every b but NaN. hi is the weight rounded to nearest, ties away from zero; finite
// weights beyond the largest bf16 plus half its ulp have hi = infinity, as any rounding to nearest has, and come back finite. NaN, whose hi
// could look like infinity or zero, is made the canonical NaN first: hi = 0x7FC0, lo = 0.
inline float joined(std::uint16_t hi, std::int16_t lo) {
    return as_float((static_cast<std::uint32_t>(hi) << 16) + static_cast<std::uint32_t>(static_cast<std::int32_t>(lo)));
}
inline std::uint32_t split_bits(float x) { return x != x ? 0x7FC00000u : as_bits(x); }
inline std::uint16_t high_part(std::uint32_t bits) { return static_cast<std::uint16_t>((bits + 0x8000u) >> 16); }
// b - (hi << 16) modulo 2^16 is b's low half whatever hi is.
inline std::int16_t low_part(std::uint32_t bits) { return static_cast<std::int16_t>(static_cast<std::uint16_t>(bits)); }

inline void split(const float* __restrict src, std::uint16_t* __restrict hi, std::int16_t* __restrict lo, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += BLOCK) {
        prefetch(src + i), prefetch(hi + i), prefetch(lo + i);
        const std::size_t stop = i + block_at(i, end);
        for (std::size_t j = i; j < stop; ++j) {
            const std::uint32_t bits = split_bits(src[j]);
            hi[j] = high_part(bits);
            lo[j] = low_part(bits);
        }
    }
}

inline void join(const std::uint16_t* __restrict hi, const std::int16_t* __restrict lo, float* __restrict dst, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += BLOCK) {
        prefetch(hi + i), prefetch(lo + i), prefetch(dst + i);
        const std::size_t stop = i + block_at(i, end);
        for (std::size_t j = i; j < stop; ++j) dst[j] = joined(hi[j], lo[j]);
    }
}
