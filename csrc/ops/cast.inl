// Casts, accumulation, and the copy that benches measure memory with.

template <Dtype S, Dtype D> inline void cast_loop(const stored<S>* __restrict src, stored<D>* __restrict dst, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = store<D>(load<S>(src[i]));
}

// n elements of src as fp32: where they are, or converted into `buffer`.
template <Dtype S> inline const float* widened(const stored<S>* src, float* buffer, std::size_t n) {
    if constexpr (S == FP32) {
        return src;
    } else {
        if constexpr (S == FP16) from_fp16(src, buffer, n);
        else cast_loop<S, FP32>(src, buffer, n);
        return buffer;
    }
}
template <Dtype D> inline void narrowed(const float* src, stored<D>* dst, std::size_t n) {
    if constexpr (D == FP16) to_fp16(src, dst, n);
    else cast_loop<FP32, D>(src, dst, n);
}

template <Dtype S, Dtype D> void cast(const void* from, void* to, std::size_t begin, std::size_t end) {
    const stored<S>* src = static_cast<const stored<S>*>(from);
    stored<D>* dst = static_cast<stored<D>*>(to);
    for (std::size_t i = begin; i < end; i += BLOCK) {
        const std::size_t n = block_at(i, end);
        prefetch(src + i), prefetch(dst + i);
        if constexpr (S == D) {
            __builtin_memcpy(dst + i, src + i, n * sizeof(stored<D>));
        } else if constexpr (S == FP16 && D == FP32) {
            from_fp16(src + i, dst + i, n);
        } else if constexpr (S != FP16 && D != FP16) {
            cast_loop<S, D>(src + i, dst + i, n);
        } else {
            float buffer[BLOCK];
            narrowed<D>(widened<S>(src + i, buffer, n), dst + i, n);
        }
    }
}

// dst = round(dst + src * scale), computed in fp32.
template <Dtype D, Dtype S> inline void accumulate_loop(stored<D>* __restrict dst, const stored<S>* __restrict src, float scale, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = store<D>(load<D>(dst[i]) + load<S>(src[i]) * scale);
}

template <Dtype D, Dtype S> void accumulate(void* to, const void* from, float scale, std::size_t begin, std::size_t end) {
    stored<D>* dst = static_cast<stored<D>*>(to);
    const stored<S>* src = static_cast<const stored<S>*>(from);
    for (std::size_t i = begin; i < end; i += BLOCK) {
        const std::size_t n = block_at(i, end);
        prefetch(src + i), prefetch(dst + i);
        if constexpr (D != FP16 && S != FP16) {
            accumulate_loop<D, S>(dst + i, src + i, scale, n);
        } else {
            float sum[BLOCK], buffer[BLOCK];
            const float* addend = widened<S>(src + i, buffer, n);
            if constexpr (D == FP16) {
                from_fp16(dst + i, sum, n);
                accumulate_loop<FP32, FP32>(sum, addend, scale, n);
                to_fp16(sum, dst + i, n);
            } else {
                accumulate_loop<D, FP32>(dst + i, addend, scale, n);
            }
        }
    }
}

// Non-temporal stores: the destination's lines are not read first. ZINF_HALF as in half.h; elsewhere a plain copy.
inline void copy(const char* __restrict src, char* __restrict dst, std::size_t bytes) {
    std::size_t i = 0;
#if defined(__x86_64__)
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64;
    if (head < bytes) {
        __builtin_memcpy(dst, src, head);
        for (i = head; i + 64 <= bytes; i += 64) {
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(src) + i + 4096), 0, 2);
#if ZINF_HALF == 3
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
#elif ZINF_HALF == 2
            for (std::size_t k = i; k < i + 64; k += 32)
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + k), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + k)));
#else
            for (std::size_t k = i; k < i + 64; k += 16)
                _mm_stream_si128(reinterpret_cast<__m128i*>(dst + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + k)));
#endif
        }
        _mm_sfence();
    }
#endif
    __builtin_memcpy(dst + i, src + i, bytes - i);
}
