// One thread block on one CPU thread: its threads are fibers, run in turn; barriers and warp exchanges are switches.
#pragma once

#include <pthread.h>

#include <cstring>
#include <memory>
#include <vector>

#include "fiber.h"

namespace hfc::host {

constexpr int kLanes = 32;
#ifdef HFC_ADDRESS_SANITIZER
constexpr std::size_t kStackBytes = 512 * 1024;  // instrumented frames are several times larger
#else
constexpr std::size_t kStackBytes = 128 * 1024;
#endif

struct Warp {
  unsigned generation = 0;
  int arrived = 0;
  void* arguments[kLanes];
};

class Block {
 public:
  static thread_local Block* current;

  Block(int num_threads, std::size_t shared_bytes)
      : num_threads_(num_threads),
        shared_bytes_(shared_bytes),
        fibers_(num_threads),
        finished_(num_threads),
        warps_((num_threads + kLanes - 1) / kLanes),
        stacks_(static_cast<char*>(std::malloc(num_threads * kStackBytes)), std::free),
        shared_(static_cast<char*>(std::aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024 + 1024)), std::free) {}

  template <typename Kernel>
  void run(Kernel&& kernel, long long block_id) {
    static thread_local Kernel* body;
    body = &kernel;
    block_id_ = block_id;
    num_running_ = num_threads_;
    unpoison_shared();
    std::memset(shared_.get(), 0xff, shared_bytes_);  // NaN: a read of what nobody wrote shows
    for (Warp& warp : warps_) warp = Warp{};
    arrived_ = 0;
    current = this;
    for (int i = 0; i < num_threads_; ++i) {
      finished_[i] = false;
      fibers_[i].prepare(stacks_.get() + i * kStackBytes, kStackBytes, [] {
        Fiber::started();
        (*body)();
        current->finish();
      });
    }
    adopt_caller();
    running_ = 0;
    Fiber::switch_to(caller_, fibers_[0]);
  }

  int thread() const { return running_; }
  long long block() const { return block_id_; }
  char* shared() { return shared_.get(); }

  void sync() {
    if (++arrived_ == num_running_) {
      arrived_ = 0;
      ++generation_;
      return;
    }
    for (const unsigned mine = generation_; generation_ == mine;) yield(next(running_));
  }

  // Every lane hands in an argument; the last to come computes for all of them, the others wait.
  template <typename Compute>
  void warp_collective(void* argument, Compute compute) {
    const int lane = running_ % kLanes;
    Warp& warp = warps_[running_ / kLanes];
    warp.arguments[lane] = argument;
    if (++warp.arrived == kLanes) {
      warp.arrived = 0;
      compute(warp.arguments);
      ++warp.generation;
      return;
    }
    const int base = running_ - lane, successor = base + (lane + 1) % kLanes;
    for (const unsigned mine = warp.generation; warp.generation == mine;)
      yield(finished_[successor] ? next(successor) : successor);
  }

 private:
  int next(int i) const {
    do i = i + 1 == num_threads_ ? 0 : i + 1;
    while (finished_[i]);
    return i;
  }

  void yield(int to) {
    const int from = running_;
    running_ = to;
    Fiber::switch_to(fibers_[from], fibers_[to]);
  }

  void finish() {
    const int from = running_;
    finished_[from] = true;
    if (--num_running_ == 0) Fiber::switch_to(fibers_[from], caller_, true);
    if (arrived_ == num_running_) {  // a thread that has left counts as arrived, as on a GPU
      arrived_ = 0;
      ++generation_;
    }
    running_ = next(from);
    Fiber::switch_to(fibers_[from], fibers_[running_], true);
  }

  void unpoison_shared() {
#ifdef HFC_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(shared_.get(), shared_bytes_);
    __asan_poison_memory_region(shared_.get() + shared_bytes_, 1024);
#endif
  }

  void adopt_caller();

  int num_threads_;
  std::size_t shared_bytes_;
  std::vector<Fiber> fibers_;
  std::vector<char> finished_;
  std::vector<Warp> warps_;
  std::unique_ptr<char, void (*)(void*)> stacks_;
  std::unique_ptr<char, void (*)(void*)> shared_;
  Fiber caller_;
  long long block_id_ = 0;
  int running_ = 0;
  int num_running_ = 0;
  int arrived_ = 0;
  unsigned generation_ = 0;
};

inline thread_local Block* Block::current = nullptr;

#ifdef HFC_ADDRESS_SANITIZER
inline void Block::adopt_caller() {
  pthread_attr_t attributes;
  void* bottom;
  std::size_t bytes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &bytes);
  pthread_attr_destroy(&attributes);
  caller_.adopt(bottom, bytes);
}
#else
inline void Block::adopt_caller() {}
#endif

}  // namespace hfc::host
