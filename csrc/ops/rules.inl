// What each optimizer does to one weight: the new weight from the old one, its gradient (scaled and clipped) and its moments, which are updated.
//
// A rule is a struct of floats, the step's constants, in the order in which zinf/ops/reference.py lists them (its NamedTuple of the same name); MOMENTS says
// how many planes it keeps. Only operations that IEEE 754 fixes, one rounding each. The first is `scale`, of the gradients: step.inl applies it.

// Kingma and Ba 2015, algorithm 1; decoupled: Loshchilov and Hutter 2019, algorithm 2. eps stands where torch.optim has it.
template <bool Decoupled> struct Adam {
    static constexpr int MOMENTS = 2;
    float scale;
    float decay;          // decoupled: 1 - lr * weight_decay; else weight_decay
    float beta1, rise1;   // rise = 1 - beta
    float beta2, rise2;
    float root;  // sqrt(1 - beta2^step)
    float eps;
    float rate;  // lr / (1 - beta1^step)

    float operator()(float p, float g, float& m, float& v) const {
        if constexpr (Decoupled) p = p * decay;
        else g = g + decay * p;
        m = beta1 * m + rise1 * g;
        v = beta2 * v + rise2 * (g * g);
        return p - rate * (m / (__builtin_sqrtf(v) / root + eps));
    }
};

// torch.optim.SGD without momentum: the one rule that keeps nothing.
struct Sgd {
    static constexpr int MOMENTS = 0;
    float scale, decay, rate;

    float operator()(float p, float g, float&, float&) const {
        g = g + decay * p;
        return p - rate * g;
    }
};

// torch.optim.SGD with momentum. At a parameter's first step m is 0 and `rise` 1, so that m becomes g, else `rise` is 1 - dampening.
template <bool Nesterov> struct Momentum {
    static constexpr int MOMENTS = 1;
    float scale, decay, momentum, rise, rate;

    float operator()(float p, float g, float& m, float&) const {
        g = g + decay * p;
        m = momentum * m + rise * g;
        return p - rate * (Nesterov ? g + momentum * m : m);
    }
};

// Chen et al. 2023, algorithm 2.
struct Lion {
    static constexpr int MOMENTS = 1;
    float scale;
    float decay;         // 1 - lr * weight_decay
    float beta1, rise1;  // rise = 1 - beta
    float beta2, rise2;
    float rate;

    float operator()(float p, float g, float& m, float&) const {
        p = p * decay;
        const float c = beta1 * m + rise1 * g;
        m = beta2 * m + rise2 * g;
        return p - rate * (c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c);  // a zero moves nothing, NaN stays NaN
    }
};

// Duchi et al. 2011, as torch.optim.Adagrad has it. At a parameter's first step s is 0 and `start` the initial accumulator, else `start` is 0.
struct Adagrad {
    static constexpr int MOMENTS = 1;
    float scale, decay, start, eps;
    float rate;  // lr / (1 + (step - 1) * lr_decay)

    float operator()(float p, float g, float& s, float&) const {
        g = g + decay * p;
        s = (s + start) + g * g;
        return p - rate * (g / (__builtin_sqrtf(s) + eps));
    }
};
