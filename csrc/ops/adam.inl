// Adam and AdamW: one body for every storage of weights and gradients; one pass over memory.

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

// The new weight; m and v are updated. Kingma and Ba 2015, algorithm 1; decoupled: Loshchilov and Hutter 2019, algorithm 2.
template <bool Decoupled> inline float adam_update(const Adam& a, float p, float g, float& m, float& v) {
    g = g * a.scale;
    if constexpr (Decoupled) p = p * a.decay;
    else g = g + a.decay * p;
    m = a.beta1 * m + a.rise1 * g;
    v = a.beta2 * v + a.rise2 * (g * g);
    return p - a.rate * (m / (__builtin_sqrtf(v) / a.root + a.eps));
}

template <Dtype G, bool Decoupled>
inline void adam_split(const Adam a, std::uint16_t* __restrict hi, std::int16_t* __restrict lo, float* __restrict m, float* __restrict v,
                       const stored<G>* __restrict grads, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        float mi = m[i], vi = v[i];
        const std::uint32_t bits = split_bits(adam_update<Decoupled>(a, joined(hi[i], lo[i]), load<G>(grads[i]), mi, vi));
        hi[i] = high_part(bits);
        lo[i] = low_part(bits);
        m[i] = mi;
        v[i] = vi;
    }
}

template <Dtype G, bool Decoupled>
inline void adam_whole(const Adam a, float* __restrict p, float* __restrict m, float* __restrict v, const stored<G>* __restrict grads, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        float mi = m[i], vi = v[i];
        p[i] = adam_update<Decoupled>(a, p[i], load<G>(grads[i]), mi, vi);
        m[i] = mi;
        v[i] = vi;
    }
}

template <Dtype W, Dtype G, bool Decoupled> void adam(const Adam& a, std::size_t begin, std::size_t end) {
    stored<W>* weights = static_cast<stored<W>*>(a.weights);
    const stored<G>* grads = static_cast<const stored<G>*>(a.grads);
    constexpr Dtype L = G == FP16 ? FP32 : G;  // what the loop reads
    float buffer[G == FP16 ? BLOCK : 1];
    for (std::size_t i = begin; i < end; i += BLOCK) {
        const std::size_t n = block_at(i, end);
        prefetch(weights + i), prefetch(a.m + i), prefetch(a.v + i), prefetch(grads + i);
        const stored<L>* g;
        if constexpr (G == FP16) {
            from_fp16(grads + i, buffer, n);
            g = buffer;
        } else {
            g = grads + i;
        }
        if constexpr (W == BF16) {
            std::int16_t* lo = static_cast<std::int16_t*>(a.rest) + i;
            prefetch(lo);
            adam_split<L, Decoupled>(a, weights + i, lo, a.m + i, a.v + i, g, n);
        } else if constexpr (W == FP16) {
            float* master = static_cast<float*>(a.rest) + i;
            prefetch(master);
            adam_whole<L, Decoupled>(a, master, a.m + i, a.v + i, g, n);
            to_fp16(master, weights + i, n);
        } else {
            adam_whole<L, Decoupled>(a, weights + i, a.m + i, a.v + i, g, n);
        }
    }
}
