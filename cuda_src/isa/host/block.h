// One thread block on one CPU thread: its threads are fibers, run in turn; barriers and warp exchanges are switches.
//
// What a GPU does beside its threads (copies, products of a warpgroup) is done as late as can be, when no thread can go on: who
// does not wait for it finds NaN. In blocks of odd number the latest comes first, in the others the earliest.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "deal.h"
#include "products.h"
#include "shared_memory.h"

namespace hfc::host {

#ifdef HFC_ADDRESS_SANITIZER
constexpr std::size_t kStackBytes = 512 * 1024;  // instrumented frames are several times larger
#else
constexpr std::size_t kStackBytes = 128 * 1024;
#endif
constexpr int kNumBarriers = 16;

struct Warp {
  unsigned generation = 0;
  int arrived = 0;
  int elsewhere = 0;  // lanes that wait for something else than their warp
  void* arguments[kLanes];
  ProductQueue products;
};

// A copy to device memory that its thread has not waited for.
struct PendingStore {
  int thread;
  bool committed;
  bool has_read;  // shared memory: it writes what it read later
  std::function<void()> read;
  std::function<void()> write;
};

class Block {
 public:
  static thread_local Block* current;

  Block(int num_threads, std::size_t shared_bytes, Deal& deal)
      : num_threads_(num_threads),
        deal_(deal),
        fibers_(num_threads),
        finished_(num_threads),
        waits_(num_threads),
        warps_((num_threads + kLanes - 1) / kLanes),
        stacks_(static_cast<char*>(std::malloc(num_threads * kStackBytes)), std::free),
        memory_(shared_bytes, num_threads) {}

  // Returns what went wrong, empty where nothing did.
  template <typename Kernel>
  const std::string& run(Kernel&& kernel, long long block_id) {
    static thread_local Kernel* body;
    body = &kernel;
    block_id_ = block_id;
    num_running_ = num_threads_;
    memory_.poison();
    for (Warp& warp : warps_) warp = Warp{};
    for (Barrier& barrier : barriers_) barrier = Barrier{};
    arrived_ = idle_ = waiting_for_blocks_ = 0;
    any_coming_ = is_first_ = false;
    failure_.clear();
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
    late_.clear();
    stores_.clear();
    return failure_;
  }

  int thread() const { return running_; }
  long long block() const { return block_id_; }
  long long num_blocks() const { return deal_.num_blocks(); }
  SharedMemory& memory() { return memory_; }
  ProductQueue& products() { return warps_[running_ / kLanes].products; }
  std::vector<PendingStore>& stores() { return stores_; }
  // Those of a thread that have read shared memory.
  void write_stores(int thread) {
    auto ready = [thread](const PendingStore& store) { return store.thread == thread && store.has_read; };
    for (const PendingStore& store : stores_)
      if (ready(store)) store.write();
    stores_.erase(std::remove_if(stores_.begin(), stores_.end(), ready), stores_.end());
  }

  // Returns whether some thread came with `value`.
  bool sync(bool value = false) {
    any_coming_ |= value;
    if (++arrived_ == num_running_)
      release();
    else
      wait_until([this, mine = generation_] { return generation_ != mine; }, "a barrier of all threads");
    return any_;  // the next barrier has to wait for this thread
  }

  void arrive_at(int id, int threads) {
    if (id < 1 || id >= kNumBarriers || threads % kLanes != 0) fail("a named barrier is 1 to 15, its threads are whole warps");
    Barrier& barrier = barriers_[id];
    if (barrier.arrived > 0 && barrier.threads != threads) fail("named barrier for other threads than before", id);
    barrier.threads = threads;
    if (++barrier.arrived < threads) return;
    barrier.arrived = 0;
    ++barrier.generation;
  }
  void sync_at(int id, int threads) {
    const unsigned mine = barriers_[id % kNumBarriers].generation;
    arrive_at(id, threads);
    wait_until([&] { return barriers_[id].generation != mine; }, "named barrier", id);
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
    waits_[running_] = {"the other lanes of the warp", -1};
    for (const unsigned mine = warp.generation; warp.generation == mine;)
      pause(finished_[successor] || warp.elsewhere > 0 ? next(running_) : successor);
    idle_ = 0;
  }

  // Lets others run until they have brought about that `ready()`. `what` and `place` are for those who read of a deadlock.
  template <typename Ready>
  void wait_until(Ready ready, const char* what, long long place = -1) {
    if (ready()) return;
    Warp& warp = warps_[running_ / kLanes];
    ++warp.elsewhere;
    waits_[running_] = {what, place};
    do pause(next(running_));
    while (!ready());
    --warp.elsewhere;
    idle_ = 0;
  }

  // The same for what thread blocks with smaller ids bring about: not in vain while one of them is under way.
  template <typename Ready>
  void wait_for_blocks(Ready ready, const char* what, long long place) {
    ++waiting_for_blocks_;
    wait_until(ready, what, place);
    --waiting_for_blocks_;
  }

  // Is done when no thread can go on.
  void later(std::function<void()> work) { late_.push_back(std::move(work)); }
  // The calling thread goes on when no other can.
  void wait_for_others(const char* what) {
    bool over = false;
    later([&over] { over = true; });
    wait_until([&over] { return over; }, what);
  }

  // Ends the block.
  [[noreturn]] void fail(const std::string& what, long long place = -1) {
    failure_ = "block " + std::to_string(block_id_) + ", thread " + std::to_string(running_) + ": " + described(what, place);
    Fiber::switch_to(fibers_[running_], caller_, true);
    std::abort();  // nobody comes back
  }

 private:
  struct Barrier {
    int threads = 0;
    int arrived = 0;
    unsigned generation = 0;
  };
  struct Wait {
    const char* what;
    long long place;
  };

  // All threads that run have come to their barrier.
  void release() {
    arrived_ = 0;
    any_ = any_coming_;
    any_coming_ = false;
    ++generation_;
  }

  int next(int i) const {
    do i = i + 1 == num_threads_ ? 0 : i + 1;
    while (finished_[i]);
    return i;
  }

  // Of a thread that cannot go on.
  void pause(int to) {
    if (++idle_ > num_threads_) nobody_goes_on();
    yield(to);
  }
  void nobody_goes_on() {
    if (late_.empty()) {
      if (idle_ <= 4 * (num_threads_ + kLanes)) return;  // within a warp some are asked more often
      if (waiting_for_blocks_ == 0 || is_first_) fail(deadlock());
      is_first_ = deal_.is_first(block_id_);  // what is waited for may have come before that: everybody is asked again
      idle_ = 0;
      std::this_thread::yield();
      return;
    }
    const bool earliest = block_id_ % 2 == 0;
    const auto work = std::move(earliest ? late_.front() : late_.back());
    earliest ? late_.pop_front() : late_.pop_back();
    idle_ = 0;
    work();
  }

  void yield(int to) {
    const int from = running_;
    if (to == from) return;
    running_ = to;
    Fiber::switch_to(fibers_[from], fibers_[to]);
  }

  void finish() {
    const int from = running_;
    finished_[from] = true;
    write_stores(from);
    for (const PendingStore& store : stores_)
      if (store.thread == from) fail("ends before its copies to device memory have read shared memory");
    if (--num_running_ == 0) {
      if (!late_.empty()) fail("ends before copies that it started");
      for (const Warp& warp : warps_)
        if (!warp.products.empty()) fail("ends before products that its block started");
      Fiber::switch_to(fibers_[from], caller_, true);
    }
    if (arrived_ == num_running_) release();  // a thread that has left counts as arrived, as on a GPU
    running_ = next(from);
    Fiber::switch_to(fibers_[from], fibers_[running_], true);
  }

  static std::string described(const std::string& what, long long place) {
    return place < 0 ? what : what + " " + std::to_string(place);
  }
  bool same_wait(int i, int j) const {
    if (finished_[i] || finished_[j]) return finished_[i] && finished_[j];
    return waits_[i].what == waits_[j].what && waits_[i].place == waits_[j].place;
  }
  std::string deadlock() const {
    std::string text = "deadlock";
    for (int first = 0, end; first < num_threads_; first = end) {
      for (end = first + 1; end < num_threads_ && same_wait(first, end);) ++end;
      const std::string waits =
          finished_[first] ? " are done" : " wait for " + described(waits_[first].what, waits_[first].place);
      text += (first == 0 ? ": threads " : "; threads ") + std::to_string(first) + " to " + std::to_string(end - 1) + waits;
    }
    return text;
  }

  void adopt_caller();

  int num_threads_;
  Deal& deal_;
  std::vector<Fiber> fibers_;
  std::vector<char> finished_;
  std::vector<Wait> waits_;  // the last of each thread
  std::vector<Warp> warps_;
  std::unique_ptr<char, void (*)(void*)> stacks_;
  SharedMemory memory_;
  std::deque<std::function<void()>> late_;
  std::vector<PendingStore> stores_;
  std::string failure_;
  Fiber caller_;
  long long block_id_ = 0;
  int running_ = 0;
  int num_running_ = 0;
  int arrived_ = 0;
  bool any_coming_ = false;  // of the threads that have come
  bool any_ = false;         // of the last barrier
  int idle_ = 0;  // threads asked in vain since one went on
  int waiting_for_blocks_ = 0;  // threads
  bool is_first_ = false;  // of the blocks under way, as far as is known
  unsigned generation_ = 0;
  Barrier barriers_[kNumBarriers];
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
