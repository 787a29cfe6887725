// A small pool of threads for loops over pieces. No OpenMP: libgomp makes a team for each thread that enters a parallel
// region, and torch brings its own.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace zinf::ops {

// Runs body(context, 0) ... body(context, pieces - 1), each once, in any order, on the caller and the pool's workers.
//
// Rules:
//  - The caller works too and returns when all pieces are done. So a pool of `threads` has threads - 1 workers, and a pool of 1 none.
//  - Several callers at once share the workers: each drains its own job, workers take from the oldest. No caller can starve.
//  - A body must not throw, and must not call the pool.
//  - Workers have the default floating-point environment; the caller gets it for the time of the call, and then its own back:
//    a process that flushes subnormals must not get bits that depend on which thread took a piece.
//  - In a forked child there are no workers: the caller does everything.
class Pool {
  public:
    using Body = void (*)(void* context, std::size_t piece) noexcept;

    // Worker k of 1 ... threads - 1 is named zinf-cpu-k and, where affinity is not empty, bound to cpu affinity[k % size]; the caller is not bound.
    Pool(int threads, const std::vector<int>& affinity);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    void close();  // workers finish the piece they are at, and are joined. Idempotent.
    void run(std::size_t pieces, Body body, void* context);

    template <class F> void for_each(std::size_t pieces, F& f) {
        run(pieces, [](void* context, std::size_t piece) noexcept { (*static_cast<F*>(context))(piece); }, &f);
    }

    struct State;  // what workers share; opaque

  private:
    const int threads_;
    std::unique_ptr<State> state_;  // null in a pool of 1
};

// The same loop on the caller alone, in the default floating-point environment.
void run_alone(std::size_t pieces, Pool::Body body, void* context);

}  // namespace zinf::ops
