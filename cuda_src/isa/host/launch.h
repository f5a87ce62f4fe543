// A kernel launch on a CPU: thread blocks are dealt to worker threads.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "block.h"

namespace hfc::host {

struct LaunchShape {
  unsigned grid_x, grid_y, grid_z;
  int num_workers;
};

template <typename Params, int kThreads, int kSharedBytes>
int launch(void (*kernel)(const Params&), const Params& params, const LaunchShape& shape) {
  const long long num_blocks = 1LL * shape.grid_x * shape.grid_y * shape.grid_z;
  std::atomic<long long> next_block{0};
  auto work = [&] {
    Block block(kThreads, kSharedBytes);
    for (long long id; (id = next_block.fetch_add(1)) < num_blocks;) block.run([&] { kernel(params); }, id);
  };
  const int num_workers = num_blocks < shape.num_workers ? int(num_blocks) : shape.num_workers;
  std::vector<std::thread> workers;
  for (int i = 1; i < num_workers; ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  return 0;
}

}  // namespace hfc::host
