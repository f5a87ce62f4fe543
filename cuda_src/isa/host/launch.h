// A kernel launch on a CPU: thread blocks are dealt to worker threads.
#pragma once

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
  const int num_workers = num_blocks < shape.num_workers ? int(num_blocks) : shape.num_workers;
  Deal deal(num_blocks, num_workers);
  static thread_local std::string failure;
  std::mutex failing;
  failure.clear();
  auto work = [&, &failure = failure](int worker) {
    Block block(kThreads, kSharedBytes, deal);
    for (long long id; (id = deal.next(worker)) < num_blocks;) {
      const std::string& failed = block.run([&] { kernel(params); }, id);
      if (failed.empty()) continue;
      deal.stop();
      const std::lock_guard<std::mutex> guard(failing);
      if (failure.empty()) failure = failed;
    }
  };
  std::vector<std::thread> workers;
  for (int i = 1; i < num_workers; ++i) workers.emplace_back(work, i);
  work(0);
  for (std::thread& worker : workers) worker.join();
  return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace hfc::host
