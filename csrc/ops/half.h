// Conversions between the floats of 16 and 32 bits. No include guard: each instruction set includes it once, in its own
// namespace. Plain C++, except for fp16 where the hardware converts (F16C, AVX-512): gcc does not vectorise _Float16.
//
// [Note: NaN] A conversion to 16 bits makes the canonical NaN, 0x7FC0 in bf16 and 0x7E00 in fp16, whatever came in: payloads
// and signs of NaN are not the same on all instruction sets even for a + b. A conversion to fp32 keeps the payload and is quiet.
// Everything else, subnormals and infinities too, is round to nearest even, bit for bit what torch's casts give.

inline float as_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::uint32_t as_bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }

inline float from_bf16(std::uint16_t h) { return as_float(static_cast<std::uint32_t>(h) << 16); }

inline std::uint16_t to_bf16(float x) {
    const std::uint32_t bits = as_bits(x);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>(x != x ? 0x7FC0u : rounded);
}

inline float from_fp16(std::uint16_t h) {
    const std::uint32_t magnitude = h & 0x7FFFu;
    const std::uint32_t shifted = (magnitude << 13) + (112u << 23);                     // exponent bias 15 -> 127
    const std::uint32_t small = as_bits(as_float(shifted + (1u << 23)) - 0x1p-14f);     // subnormal in fp16, normal in fp32
    const std::uint32_t large = shifted + (112u << 23);                                // infinity and NaN: exponent all ones
    std::uint32_t bits = magnitude < 0x0400u ? small : shifted;
    bits = magnitude >= 0x7C00u ? large : bits;
    bits |= magnitude > 0x7C00u ? 0x00400000u : 0u;  // quiet, as the hardware makes it
    return as_float(bits | (static_cast<std::uint32_t>(h & 0x8000u) << 16));
}

inline std::uint16_t to_fp16(float x) {
    const std::uint32_t bits = as_bits(x);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;  // carries into infinity
    const std::uint32_t small = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;  // the ulp of 0.5f is that of fp16's subnormals
    std::uint32_t h = magnitude < 0x38800000u ? small : normal;
    h = magnitude >= 0x47800000u ? 0x7C00u : h;
    h |= (bits >> 16) & 0x8000u;
    return static_cast<std::uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : h);
}

// Whole arrays of fp16. ZINF_HALF says what converts: 0 plain code, 2 F16C, 3 AVX-512.
inline void from_fp16(const std::uint16_t* __restrict src, float* __restrict dst, std::size_t n) {
    std::size_t i = 0;
#if ZINF_HALF == 3
    // Masked forms, here and below: gcc 12 warns of an uninitialised variable inside the others.
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(dst + i, _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
#elif ZINF_HALF == 2
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
#endif
    for (; i < n; ++i) dst[i] = from_fp16(src[i]);
}

inline void to_fp16(const float* __restrict src, std::uint16_t* __restrict dst, std::size_t n) {
    std::size_t i = 0;
#if ZINF_HALF == 3
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(src + i);
        const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
        const __m256i h = _mm512_mask_cvtps_ph(_mm256_set1_epi16(0x7E00), number, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), h);
    }
#elif ZINF_HALF == 2
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps(src + i);
        const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i wide = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m128i nan = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm_blendv_epi8(h, _mm_set1_epi16(0x7E00), nan));
    }
#endif
    for (; i < n; ++i) dst[i] = to_fp16(src[i]);
}

// Storage of a Dtype, and one element of it as fp32. fp16 arrays go through a block of fp32 instead.
template <Dtype D> struct Storage { using type = std::uint16_t; };
template <> struct Storage<FP32> { using type = float; };
template <Dtype D> using stored = typename Storage<D>::type;

template <Dtype D> inline float load(stored<D> x) {
    if constexpr (D == BF16) return from_bf16(x);
    else if constexpr (D == FP16) return from_fp16(x);
    else return x;
}
template <Dtype D> inline stored<D> store(float x) {
    if constexpr (D == BF16) return to_bf16(x);
    else if constexpr (D == FP16) return to_fp16(x);
    else return x;
}

// [Note: blocks] Kernels go in blocks of BLOCK elements: what fp16 needs beside a loop (its conversions) stays in the first-level cache, and
// each block asks for the lines of the block AHEAD elements further, of everything it reads or writes. The processor's own prefetching stops at the end
// of a 4 KiB page and starts anew on each of five streams; asking saves a tenth of Adam's time and half of a norm's (bench/adam.py).
inline constexpr std::size_t BLOCK = 128;
inline constexpr std::size_t AHEAD = 512;

// The lines of a block that starts AHEAD elements after p; beyond the end of an array it is a wasted hint.
template <class T> inline void prefetch(const T* p, std::size_t ahead = AHEAD) {
    const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(p) + ahead * sizeof(T);
    for (std::size_t k = 0; k < BLOCK * sizeof(T); k += 64) __builtin_prefetch(reinterpret_cast<const void*>(start + k));
}

inline std::size_t block_at(std::size_t i, std::size_t end) { return end - i < BLOCK ? end - i : BLOCK; }
