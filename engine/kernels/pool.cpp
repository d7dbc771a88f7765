// See pool.h.
#include "pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <chrono>

namespace pdmesh {

namespace {

// Longer than the skew of most phases: waking a thread that sleeps takes as long as several phases.
// Giving way instead of spinning would cost a time slice wherever another process wants the core.
constexpr std::chrono::microseconds kSpinTime{100};
// Between two looks at the clock.
constexpr int kSpins = 64;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread to another of the cores that it may use, and binds it to none.
void leave_cpu(int cpu) {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<std::size_t>(cpu), &others);
  if (sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
#else
  static_cast<void>(cpu);
#endif
}

}  // namespace

void Event::advance() {
  value_.fetch_add(1);
  // Sequentially consistent on both sides: a waiter that this load misses has not yet read the
  // value, and will read the new one.
  if (sleepers_.load() > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
  }
}

bool Event::wait(std::uint32_t seen) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (value_.load(std::memory_order_acquire) != seen) return false;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  changed_.wait(lock, [&] { return value_.load() != seen; });
  sleepers_.fetch_sub(1);
  return true;
}

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads),
      cpus_(new std::atomic<int>[static_cast<std::size_t>(num_threads)]) {
  for (int thread = 0; thread < num_threads; ++thread) cpus_[thread] = -1;
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back(&ThreadPool::work, this, thread);
    }
  } catch (...) {  // no destructor will be called, and those that have started wait
    end();
    throw;
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  stopping_ = true;
  started_.advance();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(Function function, void* context) {
  function_ = function;
  context_ = context;
  cpus_[0] = current_cpu();
  if (num_threads_ > 1) started_.advance();
  function(context, 0);
  barrier(0);
}

void ThreadPool::barrier(int thread) {
  if (num_threads_ == 1) return;
  cpus_[thread].store(current_cpu(), std::memory_order_relaxed);
  const std::uint32_t seen = passed_.value();
  if (arrived_.fetch_add(1) + 1 == num_threads_) {
    arrived_ = 0;
    passed_.advance();
  } else if (passed_.wait(seen)) {
    spread(thread);
  }
}

void ThreadPool::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    started_.wait(seen);
    ++seen;
    if (stopping_) return;
    spread(thread);
    function_(context_, thread);
    barrier(thread);
  }
}

void ThreadPool::spread(int thread) {
  const int cpu = current_cpu();
  cpus_[thread] = cpu;
  for (int other = 0; cpu >= 0 && other < num_threads_; ++other) {
    if (other != thread && cpus_[other] == cpu) {
      leave_cpu(cpu);
      cpus_[thread] = current_cpu();
      return;
    }
  }
}

}  // namespace pdmesh
