// Products of a warpgroup that are under way, as one of its warps sees them: 16 of the 64 rows.
#pragma once

#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

#include "shared_memory.h"

namespace hfc::host {

constexpr int kLanes = 32;
constexpr int kWarpRows = 16;

// Accumulators while products work on them. The registers hold NaN meanwhile.
struct PendingSums {
  float* registers[kLanes];  // of each lane: `tiles` tiles of 8 columns, four elements of each
  int tiles;
  int users;                    // products under way
  std::vector<float> values;    // (16, 8 * tiles)
};

struct Product {
  using Multiply = void (*)(const Product&, float* sums);

  using Digest = unsigned long long (*)(const Product&, const char* view);

  Multiply multiply;
  Digest digest_operands;
  long long a, b;  // descriptors
  bool accumulate;
  int warp = 0;                              // of the warpgroup
  const unsigned* a_registers[kLanes] = {};  // of each lane, where A is not in shared memory
  unsigned long long digest = 0;             // of the operands when it was started
  PendingSums* sums = nullptr;

  bool is_changed(const char* view) const { return digest_operands(*this, view) != digest; }
};

class ProductQueue {
 public:
  bool empty() const { return products_.empty(); }

  // `product` joins the group that is not committed yet. `registers`: the accumulators of each lane.
  void add(Product product, float* const (&registers)[kLanes], int tiles) {
    product.sums = &sums_of(registers, tiles);
    ++product.sums->users;
    products_.push_back(product);
    ++uncommitted_;
  }
  void commit() {
    groups_.push_back(uncommitted_);
    uncommitted_ = 0;
  }
  bool has_more_than(int pending) const { return int(groups_.size()) > pending; }

  // Computes the oldest committed groups, all but `pending`. Returns whether their operands are still what they were.
  bool finish(int pending, SharedMemory& memory) {
    for (; has_more_than(pending); groups_.pop_front())
      for (int i = 0; i < groups_.front(); ++i) {
        const Product& product = products_.front();
        if (product.is_changed(memory.async(0)) || product.is_changed(memory.base())) return false;
        product.multiply(product, product.sums->values.data());
        if (--product.sums->users == 0) give_back(product.sums);
        products_.pop_front();
      }
    return true;
  }

 private:
  // Of accumulators: element e of tile j of a lane.
  static std::size_t place(int lane, int tiles, int j, int e) {
    return std::size_t(lane / 4 + e / 2 * 8) * 8 * tiles + 8 * j + lane % 4 * 2 + e % 2;
  }

  PendingSums& sums_of(float* const (&registers)[kLanes], int tiles) {
    for (const auto& sums : sums_)
      if (sums->registers[0] == registers[0] && sums->tiles == tiles) return *sums;
    sums_.push_back(std::make_unique<PendingSums>());
    PendingSums& sums = *sums_.back();
    sums.tiles = tiles;
    sums.users = 0;
    sums.values.resize(kWarpRows * 8 * tiles);
    for (int lane = 0; lane < kLanes; ++lane) {
      sums.registers[lane] = registers[lane];
      for (int i = 0; i < 4 * tiles; ++i) {
        sums.values[place(lane, tiles, i / 4, i % 4)] = registers[lane][i];
        registers[lane][i] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    return sums;
  }
  void give_back(PendingSums* done) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 4 * done->tiles; ++i) done->registers[lane][i] = done->values[place(lane, done->tiles, i / 4, i % 4)];
    for (auto& sums : sums_)
      if (sums.get() == done) {
        std::swap(sums, sums_.back());
        sums_.pop_back();
        return;
      }
  }

  std::vector<std::unique_ptr<PendingSums>> sums_;
  std::deque<Product> products_;
  std::deque<int> groups_;  // products of each committed group
  int uncommitted_ = 0;
};

}  // namespace hfc::host
