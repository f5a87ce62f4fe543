// What the warpgroups of the Hopper backward share: parameters, shared memory, and the events they wait for.
#pragma once

#include "common/math.cuh"
#include "common/params.cuh"
#include "fa2/backward_sm90_order.cuh"
#include "isa.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "tile/panels.cuh"
#include "tile/ring.cuh"

namespace hfc {

// hf_flash_cupy/sm90_backward_plan.py fills it. The maps' boxes are one panel wide: kBlockM rows of q and dout, kBlockN of k and v,
// 16 of dk and dv.
struct BackwardSm90Params {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
  TensorMap dk;
  TensorMap dv;
  AttentionParams attention;
  float* row_statistics;  // (batch, num_heads, row blocks, RowStatistics::kBytes), written by the prepare kernel
  int* dq_turns;       // (batch, num_heads, row blocks, kWarpgroups), of deterministic gradients: the key block that adds next
  int* row_intervals;  // with kIntervals: (batch, heads or 1 for all, row blocks, kBlockM, 2), by prepare: each row's keys
  uint8 padding[64 - (sizeof(AttentionParams) + 24) % 64];
};

constexpr int kUnitKeys = 64;  // keys of a warpgroup's products

// What the products of a row block start from, so that nothing is left to be subtracted from them: S from -lse, in units of a
// product, and dP from -delta. -inf for rows that see no key or do not exist: their probabilities are 0 then.
template <int kBlockM>
struct RowStatistics {
  static constexpr int kScoreStarts = 0;          // bytes: kBlockM floats
  static constexpr int kLarge = 4 * kBlockM;      // four words, non-zero where some row's lse is_large(), which starts from 0
  static constexpr int kDpStarts = kLarge + 16;   // kBlockM floats
  static constexpr int kSharedBytes = kDpStarts + 4 * kBlockM;
  static constexpr int kMaxima = kSharedBytes;    // row_max, and log2 of row_sum, where lse is_large(), else 0: only of need
  static constexpr int kBytes = kMaxima + 8 * kBlockM;
  static constexpr int kScoreBytes = kDpStarts, kDpBytes = 4 * kBlockM;  // the parts that come with q and with dout
};

// Whether the rounding of lse would show in a probability: it is computed from row_max and row_sum then, as in
// probabilities_from(). fp16 has three bits more than bf16 to show it.
template <typename Element>
__device__ __forceinline__ bool is_large(float lse) {
  constexpr float kMost = is_same<Element, bf16>::value ? 512.0f : 64.0f;
  return abs_float(lse) * (1.0f / kLn2) > kMost && lse != bits_float(0xff800000u);
}

// ds takes softmax_scale before it is rounded to fp16, whose range then ends only where that of dq and dk does.
template <typename Element>
constexpr bool kScalesDs = is_same<Element, fp16>::value;

// Shared memory, from a multiple of 1024 bytes on, and its bytes at head sizes 128 (kBlockM 64) and 64 (kBlockM 128):
//
//   | k  kBlockN rows (later dk) | v  kBlockN rows (later dv) | q  2 x kBlockM rows | dout  2 x kBlockM rows
//      32 K, 16 K                   32 K, 16 K                   32 K, 32 K            32 K, 32 K
//   | ds  3 x kBlockM rows of kBlockN keys | dq  kBlockM x kHeadDim floats | statistics  2 | barriers |
//      48 K, 96 K                             32 K, 32 K
//
// and at head size 256 (kBlockM 64), where dq is staged half by half:
//
//   | k  64 rows | v  64 rows | q  2 x 64 rows | dout  64 rows | ds  2 x 64 rows of 64 keys | p  64 x 64 floats
//      32 K         32 K         64 K             32 K            16 K                         16 K
//   | dq  64 x 128 floats | statistics  2 | barriers |
//      32 K
//
// Registers: 168 a thread at the start; the loading warpgroup keeps 24, each computing one takes 240. Its accumulators at head
// sizes 128 and 64: dk 64, 32; dv 64, 32; S, then P 32, 64; dP 32, 64; dq, when S and dP are used up, 32, 32; beside them P and dS
// as operands, 16 and 16, 32 and 32. At head size 256: dv or dk 128; S, then P, or dP 32; half of the warpgroup's dq 32, beside
// those; P or dS as an operand 16.
//
// Events, one barrier a slot; who waits | who arrives:
//   k_loaded, v_loaded   consumers           | the copy engine
//   q_loaded             consumers           | the copy engine, twice: rows, and statistics
//   q_released           the loader          | each warp of the consumers
//   dout_loaded          consumers           | the copy engine, twice
//   dout_released        the loader          | each warp of the consumers
//   ds_written           consumers           | each warp of the consumers that write it
//   dq_staged            the group's adder   | the 4 warps of a warpgroup
//   dq_read              that warpgroup      | its adder
// and with kSharesKeys
//   ds_read              who has dk          | each warp of the consumers
//   p_written            who has dk          | the 4 warps of who has dv
template <typename Config>
struct BackwardSm90Traits {
  using Element = typename Config::Element;
  static constexpr int kWarpgroups = 2;  // that compute; one more loads and adds
  static constexpr int kWarps = 4 * kWarpgroups;
  // Whether the warpgroups have the same keys, and one dv of them, the other dk; else each has dk and dv of its own 64 keys.
  static constexpr bool kSharesKeys = Config::kBlockN == kUnitKeys;
  static constexpr int kRowSlots = 2;
  static constexpr int kDoutSlots = kSharesKeys ? 1 : kRowSlots;
  using RowRing = Ring<kRowSlots>;
  // dq is multiplied a step late, and a warpgroup may be that much ahead of the other.
  static constexpr int kDsSlots = kSharesKeys ? 2 : 3;
  static constexpr int kN = Config::kBlockM / 8;    // n-tiles of S and dP, whose columns are rows
  static constexpr int kND = Config::kHeadDim / 8;  // n-tiles of dk and dv
  // dq is computed transposed as well: a warpgroup has 64 of its columns at a time, or where there are no more half of the rows.
  static constexpr int kDqPanels = Config::kHeadDim / kPanelColumns;
  static constexpr int kDqParts = max(kDqPanels / kWarpgroups, 1);  // of a warpgroup, one after the other
  static constexpr int kDqRows = Config::kBlockM * kDqPanels / (kWarpgroups * kDqParts);  // of a part
  static constexpr int kNQ = kDqRows / 8;
  static_assert(Config::kHeadDim == Config::kHeadDimV && Config::kHeadDim % kPanelColumns == 0);
  static_assert(kSharesKeys || Config::kBlockN == kWarpgroups * kUnitKeys);
  static_assert(kDqRows <= Config::kBlockM && Config::kBlockM % 16 == 0);

  using TileQ = PanelTile<Config::kBlockM, Config::kHeadDim>;  // and of dout
  using TileK = PanelTile<Config::kBlockN, Config::kHeadDim>;  // and of v, dk, dv
  using TileDs = PanelTile<Config::kBlockM, Config::kBlockN>;
  using Statistics = RowStatistics<Config::kBlockM>;

  static constexpr int kAlignment = 1024;  // of the swizzle's pattern
  static constexpr int kSlack = 768;  // shared memory begins at a multiple of 256
  static constexpr int kK = 0;
  static constexpr int kV = kK + TileK::kBytes;
  static constexpr int kQ = kV + TileK::kBytes;
  static constexpr int kDout = kQ + kRowSlots * TileQ::kBytes;
  static constexpr int kDs = kDout + kDoutSlots * TileQ::kBytes;
  static constexpr int kP = kDs + kDsSlots * TileDs::kBytes;
  static constexpr int kPBytes = kSharesKeys ? Config::kBlockM * kUnitKeys * 4 : 0;
  static constexpr int kDq = kP + kPBytes;
  static constexpr int kDqBytes = Config::kBlockM * Config::kHeadDim * 4 / (kWarpgroups * kDqParts);  // of a warpgroup's part
  static constexpr int kStatistics = kDq + kWarpgroups * kDqBytes;
  static constexpr int kBarriers = kStatistics + kRowSlots * Statistics::kSharedBytes;
  // Barriers, in the order of the events.
  static constexpr int kQLoaded = 2, kQReleased = kQLoaded + kRowSlots;
  static constexpr int kDoutLoaded = kQReleased + kRowSlots, kDoutReleased = kDoutLoaded + kDoutSlots;
  static constexpr int kDsWritten = kDoutReleased + kDoutSlots;
  static constexpr int kDqStaged = kDsWritten + kDsSlots, kDqRead = kDqStaged + kWarpgroups;
  static constexpr int kDsRead = kDqRead + kWarpgroups, kPWritten = kDsRead + (kSharesKeys ? kDsSlots : 0);
  static constexpr int kNumBarriers = kPWritten + (kSharesKeys ? 1 : 0);
  static constexpr int kSharedBytes = kSlack + kBarriers + 8 * kNumBarriers;

  // Of what has one place, in which every block ends a round: rounds alternate as q's slots do.
  __device__ __forceinline__ static uint32 single_parity(RowRing rows) { return rows.slot(); }
  // Where dout lies while q is in the ring's slot.
  __device__ __forceinline__ static int dout_slot(RowRing rows) { return kDoutSlots == 1 ? 0 : rows.slot(); }
  __device__ __forceinline__ static uint32 dout_parity(RowRing rows) {
    return kDoutSlots == 1 ? single_parity(rows) : rows.parity();
  }

  SharedPtr base = align_up(shared_base(), kAlignment);

  __device__ __forceinline__ static int q_offset(int slot) { return kQ + slot * TileQ::kBytes; }
  __device__ __forceinline__ static int dout_offset(int slot) { return kDout + slot * TileQ::kBytes; }
  __device__ __forceinline__ static int ds_offset(int slot) { return kDs + slot * TileDs::kBytes; }

  __device__ __forceinline__ TileK k() const { return {base + kK}; }
  __device__ __forceinline__ TileK v() const { return {base + kV}; }
  __device__ __forceinline__ TileQ q(int slot) const { return {base + q_offset(slot)}; }
  __device__ __forceinline__ TileQ dout(int slot) const { return {base + dout_offset(slot)}; }
  __device__ __forceinline__ SharedPtr p() const { return base + kP; }
  __device__ __forceinline__ SharedPtr dq(int warpgroup) const { return base + (kDq + warpgroup * kDqBytes); }
  __device__ __forceinline__ SharedPtr statistics(int slot) const {
    return base + (kStatistics + slot * Statistics::kSharedBytes);
  }

  // Which columns of dq a warpgroup's part has, and from which row on.
  __device__ __forceinline__ static int dq_panel(int warpgroup, int part) {
    return kDqPanels == 1 ? 0 : warpgroup * kDqParts + part;
  }
  __device__ __forceinline__ static int dq_first_row(int warpgroup) { return kDqPanels == 1 ? warpgroup * kDqRows : 0; }
  // Where it lies in the sums in device memory, for the row block at `place`; in floats.
  __device__ __forceinline__ static int64 dq_place(int64 place, int warpgroup, int part) {
    return ((place * kWarpgroups + warpgroup) * kDqParts + part) * (kDqBytes / 4);
  }

  __device__ __forceinline__ SharedPtr k_loaded() const { return barrier(0); }
  __device__ __forceinline__ SharedPtr v_loaded() const { return barrier(1); }
  __device__ __forceinline__ SharedPtr q_loaded(int slot) const { return barrier(kQLoaded + slot); }
  __device__ __forceinline__ SharedPtr q_released(int slot) const { return barrier(kQReleased + slot); }
  __device__ __forceinline__ SharedPtr dout_loaded(int slot) const { return barrier(kDoutLoaded + slot); }
  __device__ __forceinline__ SharedPtr dout_released(int slot) const { return barrier(kDoutReleased + slot); }
  __device__ __forceinline__ SharedPtr ds_written(int slot) const { return barrier(kDsWritten + slot); }
  __device__ __forceinline__ SharedPtr dq_staged(int warpgroup) const { return barrier(kDqStaged + warpgroup); }
  __device__ __forceinline__ SharedPtr dq_read(int warpgroup) const { return barrier(kDqRead + warpgroup); }
  __device__ __forceinline__ SharedPtr ds_read(int slot) const { return barrier(kDsRead + slot); }
  __device__ __forceinline__ SharedPtr p_written() const { return barrier(kPWritten); }

  // One thread calls, before any other uses a barrier.
  __device__ __forceinline__ void init_barriers() const {
    mbarrier_init(k_loaded(), 1);
    mbarrier_init(v_loaded(), 1);
    for (int slot = 0; slot < kRowSlots; ++slot) {
      mbarrier_init(q_loaded(slot), 2);
      if (slot < kDoutSlots) mbarrier_init(dout_loaded(slot), 2);
      mbarrier_init(q_released(slot), kWarps);
      if (slot < kDoutSlots) mbarrier_init(dout_released(slot), kWarps);
    }
    for (int slot = 0; slot < kDsSlots; ++slot) mbarrier_init(ds_written(slot), kSharesKeys ? 4 : kWarps);
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      mbarrier_init(dq_staged(warpgroup), 4);
      mbarrier_init(dq_read(warpgroup), 1);
    }
    if constexpr (kSharesKeys) {
      for (int slot = 0; slot < kDsSlots; ++slot) mbarrier_init(ds_read(slot), kWarps);
      mbarrier_init(p_written(), 4);
    }
    fence_mbarrier_init();
    fence_async_proxy();
  }

 private:
  __device__ __forceinline__ SharedPtr barrier(int index) const { return base + (kBarriers + 8 * index); }
};

}  // namespace hfc
