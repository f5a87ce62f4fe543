// How thread blocks are dealt to worker threads: in the order of their ids, as a GPU starts them.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

namespace hfc::host {

class Deal {
 public:
  Deal(long long num_blocks, int num_workers) : num_blocks_(num_blocks), under_way_(num_workers, num_blocks) {}

  long long num_blocks() const { return num_blocks_; }

  // The next block for a worker that is done with its last; num_blocks() where none is left.
  long long next(int worker) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return under_way_[worker] = next_ < num_blocks_ ? next_++ : num_blocks_;
  }
  // Nobody gets another.
  void stop() {
    const std::lock_guard<std::mutex> guard(mutex_);
    next_ = num_blocks_;
  }
  // Whether all blocks with smaller ids are done.
  bool is_first(long long block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return *std::min_element(under_way_.begin(), under_way_.end()) >= block;
  }

 private:
  std::mutex mutex_;
  long long num_blocks_;
  long long next_ = 0;
  std::vector<long long> under_way_;  // by worker
};

}  // namespace hfc::host
