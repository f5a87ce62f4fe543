// A block's shared memory as its threads see it, and as those do who work on their own: the copy engine and wgmma (PTX ISA: the
// generic and the async proxy). What a thread writes reaches the others when that thread fences, not before.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fiber.h"

namespace hfc::host {

constexpr int kSwizzleAlignment = 1024;  // of shared memory, so that offsets stand for a GPU's addresses

// Where the copy engine and wgmma have 16 bytes that plain rows of 128 bytes would have at `offset`.
inline std::ptrdiff_t swizzled(std::ptrdiff_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

// Set by the headers of those who work on their own: other kernels need no record of what is written.
inline bool watches_writes = false;

class SharedMemory {
 public:
  SharedMemory(std::size_t bytes, int num_threads) : bytes_(bytes), threads_(allocate(bytes)), unfenced_(num_threads) {}

  // A read of what nobody wrote shows: everything is NaN.
  void poison() {
#ifdef HFC_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(threads_.get(), bytes_);
    __asan_poison_memory_region(threads_.get() + bytes_, kSwizzleAlignment);
#endif
    std::memset(threads_.get(), 0xff, bytes_);
    if (async_) std::memset(async_.get(), 0xff, bytes_);
    for (auto& writes : unfenced_) writes.clear();
  }

  char* base() { return threads_.get(); }
  std::size_t bytes() const { return bytes_; }

  // `offset` as the copy engine and wgmma see it.
  char* async(std::size_t offset) {
    if (!async_) {
      async_ = allocate(bytes_);
      std::memset(async_.get(), 0xff, bytes_);
    }
    return async_.get() + offset;
  }

  // Whether both see the same, and, if not empty, what `copy` holds of it.
  bool agrees(std::size_t offset, std::size_t bytes, const std::vector<char>& copy = {}) {
    if (std::memcmp(async(offset), base() + offset, bytes) != 0) return false;
    return copy.empty() || std::memcmp(base() + offset, copy.data(), bytes) == 0;
  }

  void note_write(int thread, const char* address, int bytes) { unfenced_[thread].push_back({address - base(), bytes}); }
  void fence(int thread) {
    for (const Write& write : unfenced_[thread]) std::memcpy(async(write.offset), base() + write.offset, write.bytes);
    unfenced_[thread].clear();
  }

 private:
  using Memory = std::unique_ptr<char, void (*)(void*)>;
  struct Write {
    std::ptrdiff_t offset;
    int bytes;
  };

  static Memory allocate(std::size_t bytes) {
    const std::size_t whole = (bytes + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment + kSwizzleAlignment;
    return Memory(static_cast<char*>(std::aligned_alloc(kSwizzleAlignment, whole)), std::free);
  }

  std::size_t bytes_;
  Memory threads_;
  Memory async_{nullptr, std::free};
  std::vector<std::vector<Write>> unfenced_;  // by thread
};

}  // namespace hfc::host
