#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <cfenv>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "check.h"

namespace zinf::ops {
namespace {

// Counts the forks above this process: a pool made under another count has lost its threads.
std::atomic<unsigned> forks{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

// Round to nearest, no flush to zero, no trap; and on leaving what there was before.
class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&saved_); }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

  private:
    std::fenv_t saved_;
};

// One call of run(), on its caller's stack.
struct Job {
    Pool::Body body;
    void* context;
    const std::size_t pieces;
    std::atomic<std::size_t> next{0};  // the piece to take
    int workers = 0;                   // inside drain(); guarded by State::mutex
    std::condition_variable left;      // a worker left; the caller waits for workers == 0

    void drain() {
        for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < pieces; i = next.fetch_add(1, std::memory_order_relaxed)) body(context, i);
    }
};

}  // namespace

struct Pool::State {
    std::mutex mutex;
    std::condition_variable wake;  // a job came, or stop; workers wait
    std::deque<Job*> jobs;         // those that may have pieces to take, oldest first
    bool stop = false;
    std::vector<std::thread> workers;
    const unsigned born = forks.load(std::memory_order_relaxed);

    bool orphaned() const { return born != forks.load(std::memory_order_relaxed); }

    void forget(Job* job) {
        for (auto it = jobs.begin(); it != jobs.end(); ++it)
            if (*it == job) {
                jobs.erase(it);
                return;
            }
    }

    void work() {
        std::fesetenv(FE_DFL_ENV);
        std::unique_lock lock(mutex);
        while (true) {
            wake.wait(lock, [this] { return stop || !jobs.empty(); });
            if (jobs.empty()) return;
            Job* job = jobs.front();
            ++job->workers;
            lock.unlock();
            job->drain();
            lock.lock();
            forget(job);  // drained: no one need look at it again
            // Notified under the lock: the caller owns the condition variable and may return as soon as it gets the lock.
            if (--job->workers == 0) job->left.notify_one();
        }
    }
};

Pool::Pool(int threads, const std::vector<int>& affinity) : threads_(threads) {
    ZINF_CHECK(threads >= 1, "threads: expected at least 1, got " + std::to_string(threads));
    for (int cpu : affinity) ZINF_CHECK(cpu >= 0 && cpu < CPU_SETSIZE, "affinity: no such cpu: " + std::to_string(cpu));
    if (threads == 1) return;
    state_ = std::make_unique<State>();
    try {
        for (int k = 1; k < threads; ++k) {
            std::thread& worker = state_->workers.emplace_back([state = state_.get()] { state->work(); });
            char name[16];  // the kernel's limit, with the end
            std::snprintf(name, sizeof name, "zinf-cpu-%d", k % 100000);
            pthread_setname_np(worker.native_handle(), name);
            if (affinity.empty()) continue;
            const int cpu = affinity[static_cast<std::size_t>(k) % affinity.size()];
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cpu, &set);
            const int error = pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);
            ZINF_CHECK(error == 0, "affinity: cannot bind a thread to cpu " + std::to_string(cpu));
        }
    } catch (...) {
        close();
        throw;
    }
}

Pool::~Pool() { close(); }

void Pool::close() {
    if (!state_) return;
    if (state_->orphaned()) {
        // The threads are not in this process, and destroying what they wait on would wait for them: leave it to the end of the process.
        static_cast<void>(state_.release());
        return;
    }
    std::vector<std::thread> workers;
    {
        std::lock_guard lock(state_->mutex);
        state_->stop = true;
        workers.swap(state_->workers);
    }
    state_->wake.notify_all();
    for (std::thread& worker : workers) worker.join();
}

void Pool::run(std::size_t pieces, Body body, void* context) {
    if (pieces <= 1 || !state_ || state_->orphaned()) return run_alone(pieces, body, context);
    Job job{body, context, pieces, {}, 0, {}};
    {
        std::lock_guard lock(state_->mutex);
        state_->jobs.push_back(&job);
    }
    state_->wake.notify_all();
    {
        DefaultFloats floats;
        job.drain();
    }
    std::unique_lock lock(state_->mutex);
    state_->forget(&job);
    job.left.wait(lock, [&job] { return job.workers == 0; });
}

void run_alone(std::size_t pieces, Pool::Body body, void* context) {
    DefaultFloats floats;
    for (std::size_t i = 0; i < pieces; ++i) body(context, i);
}

}  // namespace zinf::ops
