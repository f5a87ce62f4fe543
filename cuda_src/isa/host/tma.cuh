// Copies of boxes of a tensor by the copy engine: see isa/ptx/tma.cuh.
#pragma once

#include <algorithm>

#include "common/types.cuh"
#include "mbarrier.cuh"
#include "reduce.cuh"
#include "thread.cuh"

namespace hfc {

// As hf_flash_cupy/tensormap.py writes it, innermost dimension first: columns, rows, heads, entries. Boxes are swizzled by 128 bytes.
struct TensorMap {
  char* address;
  int64 sizes[4];
  int64 strides[3];  // bytes from one row, head, entry to the next
  int64 box[2];      // columns and rows
  int64 element_bytes;
  int64 unused[5];
};
static_assert(sizeof(TensorMap) == 128);  // as a CUtensorMap

namespace host {

inline const bool kCopiesWatchWrites = watches_writes = true;

constexpr int kBoxRowBytes = 128;

struct BoxPlace {
  int column, row, head, entry;
};

inline int64 box_bytes(const TensorMap& map) { return kBoxRowBytes * map.box[1]; }

inline std::ptrdiff_t shared_offset(SharedPtr place, int64 bytes, int alignment) {
  const std::ptrdiff_t offset = place - shared_base();
  if (offset % alignment != 0 || offset < 0 || offset + bytes > std::ptrdiff_t(Block::current->memory().bytes()))
    Block::current->fail("the copy engine takes shared memory on multiples of " + std::to_string(alignment) + " bytes, not at",
                         offset);
  return offset;
}
inline std::ptrdiff_t box_offset(const TensorMap& map, SharedPtr place) {
  if (map.box[0] * map.element_bytes != kBoxRowBytes) Block::current->fail("a swizzled box has rows of 128 bytes");
  return shared_offset(place, box_bytes(map), kBoxRowBytes);
}

// visit(offset in shared memory, address in device memory, bytes of these 16 that the tensor has) for each chunk of a box.
template <typename Visit>
inline void visit_box(const TensorMap& map, std::ptrdiff_t offset, const BoxPlace& place, Visit visit) {
  const int64 chunk_columns = 16 / map.element_bytes;
  auto inside = [&](int64 index, int dimension) { return index >= 0 && index < map.sizes[dimension]; };
  for (int64 i = 0; i < map.box[1]; ++i) {
    const int64 row = place.row + i;
    const bool exists = inside(row, 1) && inside(place.head, 2) && inside(place.entry, 3);
    for (int chunk = 0; chunk < kBoxRowBytes / 16; ++chunk) {
      const int64 column = place.column + chunk * chunk_columns, left = map.sizes[0] - column;
      const int64 columns = !exists || column < 0 || left < 0 ? 0 : left < chunk_columns ? left : chunk_columns;
      char* address = map.address;
      if (columns > 0)
        address += column * map.element_bytes + row * map.strides[0] + place.head * map.strides[1] + place.entry * map.strides[2];
      visit(swizzled(offset + i * kBoxRowBytes + chunk * 16), address, columns * map.element_bytes);
    }
  }
}

// What lay in shared memory is lost at once, what is copied comes as late as can be. copy(memory): to both of its views.
template <typename Copy>
inline void start_load(std::ptrdiff_t offset, int bytes, SharedPtr barrier, Copy copy) {
  SharedMemory& memory = Block::current->memory();
  std::memset(memory.base() + offset, 0xff, bytes);
  std::memset(memory.async(offset), 0xff, bytes);
  Block::current->later([=, &memory] {
    copy(memory);
    mbarrier_count(barrier, 0, -bytes);
  });
}

// copy(what it read): from what the copy engine sees, when the calling thread waits for it.
template <typename Copy>
inline void start_store(std::ptrdiff_t offset, std::ptrdiff_t bytes, Copy copy) {
  SharedMemory& memory = Block::current->memory();
  if (!memory.agrees(offset, bytes)) Block::current->fail("written and not fenced: what goes to device memory from", offset);
  const std::vector<char> before(memory.base() + offset, memory.base() + offset + bytes);
  auto read = [=, &memory] {
    if (!memory.agrees(offset, bytes, before)) Block::current->fail("changes on its way to device memory from", offset);
  };
  Block::current->stores().push_back({thread_id(), false, false, read, [=] { copy(before.data()); }});
}

}  // namespace host

inline void tma_load(SharedPtr target, const TensorMap& map, SharedPtr barrier, int column, int row, int head, int entry) {
  const std::ptrdiff_t offset = host::box_offset(map, target);
  const host::BoxPlace place{column, row, head, entry};
  host::start_load(offset, int(host::box_bytes(map)), barrier, [=, &map](host::SharedMemory& memory) {
    host::visit_box(map, offset, place, [&](std::ptrdiff_t to, const char* from, int64 bytes) {
      std::memset(memory.base() + to, 0, 16);
      std::memcpy(memory.base() + to, from, bytes);
      std::memcpy(memory.async(to), memory.base() + to, 16);
    });
  });
}
inline void bulk_load(SharedPtr target, const void* source, int bytes, SharedPtr barrier) {
  const std::ptrdiff_t offset = host::shared_offset(target, bytes, 16);
  host::start_load(offset, bytes, barrier, [=](host::SharedMemory& memory) {
    std::memcpy(memory.base() + offset, source, bytes);
    std::memcpy(memory.async(offset), source, bytes);
  });
}

inline void tma_store(const TensorMap& map, SharedPtr source, int column, int row, int head, int entry) {
  const std::ptrdiff_t offset = host::box_offset(map, source);
  const host::BoxPlace place{column, row, head, entry};
  host::start_store(offset, host::box_bytes(map), [=, &map](const char* read) {
    host::visit_box(map, offset, place,
                    [&](std::ptrdiff_t from, char* to, int64 bytes) { std::memcpy(to, read + (from - offset), bytes); });
  });
}
inline void bulk_add(float* target, SharedPtr source, int bytes) {
  const std::ptrdiff_t offset = host::shared_offset(source, bytes, 16);
  host::start_store(offset, bytes, [=](const char* sums) {
    for (int i = 0; i < bytes / 4; ++i) reduce_add(target + i, {read<float>(sums + 4 * i)});
  });
}
inline void tma_store_commit() {
  for (host::PendingStore& store : host::Block::current->stores())
    if (store.thread == thread_id()) store.committed = true;
}
inline void tma_store_wait_read() {
  std::vector<host::PendingStore>& stores = host::Block::current->stores();
  const int thread = thread_id();
  auto unread = [thread](const host::PendingStore& store) {
    return store.thread == thread && store.committed && !store.has_read;
  };
  if (std::none_of(stores.begin(), stores.end(), unread)) return;
  host::Block::current->wait_for_others("its copies to device memory");
  for (host::PendingStore& store : stores) {
    if (!unread(store)) continue;
    store.read();
    store.has_read = true;
  }
}
inline void tma_store_wait() {
  tma_store_wait_read();
  host::Block::current->write_stores(thread_id());
}

inline void fence_async_proxy() { host::Block::current->memory().fence(thread_id()); }

}  // namespace hfc
