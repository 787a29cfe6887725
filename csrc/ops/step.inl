// One step of an optimizer: one body for every rule (rules.inl) and every storage of weights and gradients; one pass over memory.

// The gradient, unscaled and clipped by norm in one factor, then clipped by value; NaN stays NaN.
inline float clipped(float g, float scale, float most) {
    g = g * scale;
    return g > most ? most : g < -most ? -most : g;
}

// With Average, `ema` becomes keep * ema + take * weight, of the weight after the step; at a parameter's first step (fresh) the
// average of what came before is the weight before the step.
template <class Rule, bool Split, Dtype G, bool Average>
inline void step_block(const Rule rule, const Step a, std::uint16_t* __restrict hi, std::int16_t* __restrict lo, float* __restrict whole, float* __restrict m,
                       float* __restrict v, float* __restrict ema, const stored<G>* __restrict grads, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        float mi = 0, vi = 0, old, p;
        if constexpr (Rule::MOMENTS > 0) mi = m[i];
        if constexpr (Rule::MOMENTS > 1) vi = v[i];
        if constexpr (Split) old = joined(hi[i], lo[i]);
        else old = whole[i];
        p = rule(old, clipped(load<G>(grads[i]), rule.scale, a.most), mi, vi);
        if constexpr (Average) ema[i] = a.keep * (a.fresh ? old : ema[i]) + a.take * p;
        if constexpr (Split) {
            const std::uint32_t bits = split_bits(p);
            hi[i] = high_part(bits);
            lo[i] = low_part(bits);
        } else {
            whole[i] = p;
        }
        if constexpr (Rule::MOMENTS > 0) m[i] = mi;
        if constexpr (Rule::MOMENTS > 1) v[i] = vi;
    }
}

template <class Rule, Dtype W, Dtype G, bool Average> void step(const Step& a, std::size_t begin, std::size_t end) {
    Rule rule;
    static_assert(sizeof(Rule) <= sizeof(a.scalars));
    __builtin_memcpy(&rule, a.scalars, sizeof(Rule));
    stored<W>* weights = static_cast<stored<W>*>(a.weights);
    const stored<G>* grads = static_cast<const stored<G>*>(a.grads);
    constexpr Dtype L = G == FP16 ? FP32 : G;  // what the loop reads
    float buffer[G == FP16 ? BLOCK : 1];
    for (std::size_t i = begin; i < end; i += BLOCK) {
        const std::size_t n = block_at(i, end);
        float *m = nullptr, *v = nullptr, *ema = nullptr;
        prefetch(weights + i), prefetch(grads + i);
        if constexpr (Rule::MOMENTS > 0) m = a.moments[0] + i, prefetch(m);
        if constexpr (Rule::MOMENTS > 1) v = a.moments[1] + i, prefetch(v);
        if constexpr (Average) ema = a.ema + i, prefetch(ema);
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
            step_block<Rule, true, L, Average>(rule, a, weights + i, lo, nullptr, m, v, ema, g, n);
        } else if constexpr (W == FP16) {
            float* master = static_cast<float*>(a.rest) + i;
            prefetch(master);
            step_block<Rule, false, L, Average>(rule, a, nullptr, nullptr, master, m, v, ema, g, n);
            to_fp16(master, weights + i, n);
        } else {
            step_block<Rule, false, L, Average>(rule, a, nullptr, nullptr, weights + i, m, v, ema, g, n);
        }
    }
}
