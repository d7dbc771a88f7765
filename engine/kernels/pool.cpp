// See pool.h.
#include "pool.h"

namespace pdmesh {

namespace {

// About 20 microseconds: longer than a balanced phase's skew, shorter than a time slice.
constexpr int kSpins = 400;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
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

void Event::wait(std::uint32_t seen) {
  for (int i = 0; i < kSpins; ++i) {
    if (value_.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  changed_.wait(lock, [&] { return value_.load() != seen; });
  sleepers_.fetch_sub(1);
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) {
    threads_.emplace_back(&ThreadPool::work, this, thread);
  }
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  started_.advance();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(Function function, void* context) {
  function_ = function;
  context_ = context;
  if (num_threads_ > 1) started_.advance();
  function(context, 0);
  barrier();
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const std::uint32_t seen = passed_.value();
  if (arrived_.fetch_add(1) + 1 == num_threads_) {
    arrived_ = 0;
    passed_.advance();
  } else {
    passed_.wait(seen);
  }
}

void ThreadPool::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    started_.wait(seen);
    ++seen;
    if (stopping_) return;
    function_(context_, thread);
    barrier();
  }
}

}  // namespace pdmesh
