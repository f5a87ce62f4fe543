// A kernel launch on a CPU: thread blocks are dealt to worker threads.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "block.h"

namespace hfc::host {

struct LaunchShape {
  unsigned grid_x, grid_y, grid_z;
  int num_workers;
};

// What went wrong in the first thread block that failed, null where all is well; valid until the next launch of the same thread.
template <typename Params, int kThreads, int kSharedBytes>
const char* launch(void (*kernel)(const Params&), const Params& params, const LaunchShape& shape) {
  const long long num_blocks = 1LL * shape.grid_x * shape.grid_y * shape.grid_z;
  std::atomic<long long> next_block{0};
  static thread_local std::string failure;
  std::mutex failing;
  failure.clear();
  auto work = [&, &failure = failure] {
    Block block(kThreads, kSharedBytes);
    for (long long id; (id = next_block.fetch_add(1)) < num_blocks;) {
      const std::string& failed = block.run([&] { kernel(params); }, id, num_blocks);
      if (failed.empty()) continue;
      next_block = num_blocks;
      const std::lock_guard<std::mutex> guard(failing);
      if (failure.empty()) failure = failed;
    }
  };
  const int num_workers = num_blocks < shape.num_workers ? int(num_blocks) : shape.num_workers;
  std::vector<std::thread> workers;
  for (int i = 1; i < num_workers; ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace hfc::host
