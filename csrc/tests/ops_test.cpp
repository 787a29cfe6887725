// The pool under many callers, and every kernel of every instruction set at the ends of its arrays: what a race detector and a watch over
// memory should see without an interpreter around it. tests/test_ops_native.py builds this under ThreadSanitizer (the pool alone: -DPOOL_ONLY, kernels share
// nothing) and under AddressSanitizer and UBSan, and runs it. Exit status 0: all well.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ops/dispatch.h"
#include "ops/pool.h"
#include "tests/expect.h"

using namespace zinf::ops;

namespace {

// Each piece once, all of them done when run returns: plain ints, so that a missing order is a race that can be seen.
void loop(Pool& pool, std::size_t pieces) {
    std::vector<int> seen(pieces, 0);
    auto body = [&](std::size_t k) noexcept { ++seen[k]; };
    pool.for_each(pieces, body);
    for (int times : seen) EXPECT(times == 1);
}

void crowd(int threads) {
    Pool pool(threads, {});
    std::vector<std::thread> callers;
    for (unsigned c = 0; c < 6; ++c)
        callers.emplace_back([&pool, c] {
            std::mt19937 random(c);
            for (int i = 0; i < 200; ++i) loop(pool, random() % 50);
        });
    for (std::thread& caller : callers) caller.join();
}

// close() while others call: the callers finish alone.
void close_under_fire() {
    for (int i = 0; i < 20; ++i) {
        Pool pool(3, {});
        std::thread caller([&] {
            for (int k = 0; k < 50; ++k) loop(pool, 20);
        });
        pool.close();
        caller.join();
        pool.close();
        loop(pool, 20);
    }
}

void forked() {
    Pool pool(3, {});
    loop(pool, 20);
    const pid_t child = fork();
    if (child == 0) {
        loop(pool, 20);
        _exit(0);
    }
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    loop(pool, 20);
}

#ifndef POOL_ONLY

constexpr std::size_t SIZE[DTYPES] = {2, 2, 4};

// Exactly as many bytes as there are, so that a byte too far is seen. Values between 1/4 and 4 in any dtype: small ints of the exponent's bits.
struct Array {
    Array(std::size_t n, Dtype d, unsigned seed) : bytes(n * SIZE[d]) {
        std::mt19937 random(seed);
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t sign = random() & 1, bits = 0x3E800000u + random() % 0x02000000u;
            const std::uint32_t value = d == FP16 ? (sign << 15) + 0x3400u + random() % 0x1000u : (sign << 31) + bits;
            const std::uint16_t half = static_cast<std::uint16_t>(d == BF16 ? value >> 16 : value);
            std::memcpy(bytes.data() + i * SIZE[d], d == FP32 ? static_cast<const void*>(&value) : &half, SIZE[d]);
        }
    }
    void* data() { return bytes.data(); }
    float* floats() { return reinterpret_cast<float*>(bytes.data()); }
    std::vector<unsigned char> bytes;
};

std::vector<unsigned char> stepped(const Kernels& kernels, int rule, Dtype w, Dtype g, bool ema, std::size_t n) {
    Array weights(n, w, 1), rest(n, w == BF16 ? BF16 : FP32, 2), first(n, FP32, 3), second(n, FP32, 4), average(n, FP32, 5), grads(n, g, 6);
    for (std::size_t i = 0; i < n; ++i) second.floats()[i] = 0.5f;  // of squares
    Step s{};
    s.weights = weights.data(), s.rest = w == FP32 ? nullptr : rest.data(), s.grads = grads.data();
    s.moments[0] = first.floats(), s.moments[1] = second.floats(), s.ema = ema ? average.floats() : nullptr;
    for (float& scalar : s.scalars) scalar = 0.5f;
    s.most = 3e38f, s.keep = 0.5f, s.take = 0.5f, s.fresh = false;
    kernels.rules[rule].step[w][g][ema](s, 0, n);
    std::vector<unsigned char> all;
    for (Array* a : {&weights, &rest, &first, &second, &average}) all.insert(all.end(), a->bytes.begin(), a->bytes.end());
    return all;
}

std::vector<unsigned char> others(const Kernels& kernels, Dtype a, Dtype b, std::size_t n) {
    Array x(n, a, 1), y(n, b, 2), master(n, FP32, 3), hi(n, BF16, 4), lo(n, BF16, 5), joined(n, FP32, 6);
    std::vector<double> partials(n / SUM_PIECE + 1, 0.0);
    kernels.sum_squares[a](x.data(), 0, n, partials.data());
    kernels.cast[a][b](x.data(), y.data(), 0, n);
    kernels.accumulate[b][a](y.data(), x.data(), 0.5f, 0, n);
    auto* high = static_cast<std::uint16_t*>(hi.data());
    auto* low = static_cast<std::int16_t*>(lo.data());
    kernels.split(master.floats(), high, low, 0, n);
    kernels.join(high, low, joined.floats(), 0, n);
    EXPECT(joined.bytes == master.bytes);
    Array copied(n, a, 7);
    kernels.copy(static_cast<const char*>(x.data()), static_cast<char*>(copied.data()), x.bytes.size());
    EXPECT(copied.bytes == x.bytes);
    std::vector<unsigned char> all(y.bytes);
    all.resize(all.size() + partials.size() * sizeof(double));
    std::memcpy(all.data() + y.bytes.size(), partials.data(), partials.size() * sizeof(double));
    return all;
}

void kernels() {
    std::size_t compared = 0;
    for (std::size_t n : {1u, 3u, 15u, 16u, 17u, 63u, 100u, 513u, 2047u, 2049u})
        for (int a = 0; a < DTYPES; ++a)
            for (int b = 0; b < DTYPES; ++b)
                for (std::string_view isa : available_isas()) {
                    const Kernels &ours = kernels_of(isa), &plain = kernels_of("baseline");
                    const Dtype x = static_cast<Dtype>(a), y = static_cast<Dtype>(b);
                    EXPECT(others(ours, x, y, n) == others(plain, x, y, n));
                    for (int rule = 0; rule < RULES; ++rule)
                        for (bool ema : {false, true}) {
                            if (!ours.rules[rule].step[x][y][ema]) continue;
                            EXPECT(stepped(ours, rule, x, y, ema, n) == stepped(plain, rule, x, y, ema, n));
                            ++compared;
                        }
                }
    EXPECT(compared > 500);
}

#endif

}  // namespace

int main() {
    for (int threads : {1, 2, 4}) crowd(threads);
    close_under_fire();
    forked();
#ifndef POOL_ONLY
    kernels();
#endif
    std::puts("ok");
    return 0;
}
