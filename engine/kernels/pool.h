// A fixed team of threads that runs one function at a time, with barriers inside it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pdmesh {

// Waits by spinning briefly, because the next phase is usually microseconds away, and then by
// sleeping, because the core may be needed by another process.
class Event {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();
  // Returns once the value is no longer `seen`: whether the thread has slept.
  bool wait(std::uint32_t seen);

 private:
  std::atomic<std::uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class ThreadPool {
 public:
  using Function = void (*)(void* context, int thread);

  // Throws std::system_error if the system has no more threads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }
  // Runs `function` on every thread, the caller being thread 0; one caller at a time.
  void run(Function function, void* context);
  // Called by every thread inside `run`: nobody goes on before all have come.
  void barrier(int thread);

 private:
  void end();
  void work(int thread);
  // A thread that was woken on the core of its waker stays there while other cores have anything
  // to do, and the two would take turns, each spinning for the other at every barrier: who has
  // slept looks where the others are, and moves.
  void spread(int thread);

  const int num_threads_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::atomic<int> arrived_{0};
  std::unique_ptr<std::atomic<int>[]> cpus_;  // where each thread was last
  Event started_;
  Event passed_;
  std::vector<std::thread> threads_;
};

}  // namespace pdmesh
