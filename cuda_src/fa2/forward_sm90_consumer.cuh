// A warpgroup that computes: 64 rows of each tile. Its products run in the tensor cores while the softmax of the other
// warpgroups runs in the rest of the SM; its own S = Q Kᵀ of a block runs beside P V of the block before.
#pragma once

#include "fa2/forward_sm90_record.cuh"
#include "fa2/forward_sm90_softmax.cuh"
#include "fa2/forward_sm90_store.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
#include "tile/fragment.cuh"

namespace hfc {

template <typename Config>
class ForwardConsumer {
  using Traits = ForwardSm90Traits<Config>;
  using Element = typename Traits::Element;
  using Tile = RowTile<Config>;
  using Softmax = StaleSoftmax<Element, Traits::kN>;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  // Whether a step asks for each block if it hides keys. Plain causal rows know by where it lies in the walk, and have two steps, one
  // of which looks at maxima first: the blocks that they see in part may be most of theirs. For all others that would take the
  // compiler half a second more.
  static constexpr bool kChanged = Config::kSoftcap || Config::kAlibi || !Config::kPositiveScale;
  static constexpr bool kAsks = Traits::kHoles || Config::kLeft || (Config::kCausal && (Config::kVarlen || kChanged));

 public:
  __device__ __forceinline__ ForwardConsumer(const ForwardSm90Params& params, const Traits& shared, int warpgroup)
      : params_(params), shared_(shared), warpgroup_(warpgroup), warp_(warp_id() % 4), operand_(matrix_descriptor(shared.base)) {
    clear(scores_);
    clear(out_);
  }

  // Tiles of which this warpgroup has rows follow each other without a pause: the first scores of one are computed beside the
  // last output of the one before.
  __device__ __forceinline__ void run() {
    if (Config::kTurns && warpgroup_ == Config::kWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's
    // One place reads a tile, at the loop's head: in other forms the compiler no longer sees that all lanes go the same way, and
    // computes every operand's address in each of them.
    for (;;) {
      Tile tile = next_tile();
      if (!tile.exists()) break;
      if (!tile.has_rows(warpgroup_)) {
        pass_tile(tile);
        if constexpr (!Config::kFused) release_tile();
        continue;
      }
      begin(tile);
      if constexpr (!Config::kFused) {
        walk_keys(tile);
        finish(tile);
      } else {
        do walk_keys(tile);
        while (finish_into_next(tile));  // `tile` is the one after
        release_q(previous_q());
        storing_ = false;
        if (!tile.exists()) break;
        pass_tile(tile);
      }
    }
    if (lane_id() == 0) tma_store_wait();
  }

 private:
  __device__ __forceinline__ Tile next_tile() {
    const Tile tile = known_tile<Config>(shared_, tiles_);
    if constexpr (Config::kFused) release_tile();
    return tile;
  }
  __device__ __forceinline__ void release_tile() {
    sync_warp();
    arrive(shared_.tile_read(tiles_.slot()));
    tiles_.advance();
  }

  // Blocks of keys that the rows of the tile see, and those that this warpgroup's do.
  __device__ __forceinline__ KeyBlocks tile_blocks(const Tile& tile) const { return blocks_of_tile(params_, tile, record()); }
  __device__ __forceinline__ KeyBlocks unit_blocks(const Tile& tile) const {
    return blocks_of_unit(params_, tile, warpgroup_, record());
  }
  // What the key loader wrote of the tile: there to its end, unless kFused, which reads the next one before.
  __device__ __forceinline__ SharedPtr record() const { return shared_.tile(tiles_.slot()); }
  // How many only later rows of the tile see, and how many only earlier ones.
  __device__ __forceinline__ int blocks_above(const Tile& tile) const { return tile_blocks(tile).end - unit_blocks(tile).end; }
  __device__ __forceinline__ int blocks_below(const Tile& tile) const {
    return unit_blocks(tile).first - tile_blocks(tile).first;
  }

  // S of the tile's first block, with nothing beside it.
  __device__ __forceinline__ void begin(const Tile& tile) {
    pass_blocks(blocks_above(tile));
    block_ = unit_blocks(tile).end - 1;
    mbarrier_wait(shared_.q_loaded(warpgroup_, q_.slot()), q_.parity());
    mbarrier_wait(shared_.k_loaded(k_.slot()), k_.parity());
    hold_registers(scores_[0]);
    wgmma_fence();
    multiply_keys();
    wgmma_commit();
    wgmma_wait<0>();
    hold_registers(scores_[0]);
    release_k();
  }

  // From the scores of the last block to the probabilities of the first.
  __device__ __forceinline__ void walk_keys(const Tile& tile) {
    const KeyBlocks blocks = unit_blocks(tile);
    const float scale = modify(tile);
    if (!blocks.whole(block_)) hide_keys(tile);
    softmax_.start(probabilities_, scores_, scale);
    clear(out_);
    --block_;
    if constexpr (kAsks) {
      for (; block_ >= blocks.first; --block_) step<Config::kMask>(tile, Config::kMask || !blocks.whole(block_));
    } else {
      if constexpr (Config::kCausal)
        for (; block_ >= max(blocks.whole_end, 0); --block_) step<true>(tile);
      for (; block_ >= 0; --block_) step<false>(tile);
    }
  }

  // Scores of block_ beside the output of the block after it, then block_'s softmax. `hides`: from some rows some of its keys.
  // kMasked: from many, so that maxima are looked at first.
  template <bool kMasked>
  __device__ __forceinline__ void step(const Tile& tile, bool hides = kMasked) {
    mbarrier_wait(shared_.k_loaded(k_.slot()), k_.parity());
    mbarrier_wait(shared_.v_loaded(v_.slot()), v_.parity());  // here, not in between: a divergent loop there serialises wgmma
    multiply_both();
    release_k();
    const float scale = modify(tile);
    constexpr bool kBeside = !Traits::kHoles;  // hiding, unless it wants the registers of the probabilities
    const auto ready = [&] {
      if constexpr (kBeside) wait_out();
    };
    if constexpr (!kBeside) wait_out();
    if (hides) hide_keys(tile);
    if constexpr (kMasked) {
      softmax_.update_masked(probabilities_, scores_, out_, scale, ready);
    } else {
      ready();
      softmax_.update(probabilities_, scores_, out_, scale);
    }
    if (Config::kFused && storing_) {
      release_q(previous_q());
      storing_ = false;
    }
  }

  // The last output of the tile, with nothing beside it.
  __device__ __forceinline__ void finish(const Tile& tile) {
    mbarrier_wait(shared_.v_loaded(v_.slot()), v_.parity());
    hold_registers(out_[0]);
    hold_registers(probabilities_);
    wgmma_fence();
    multiply_probabilities();
    wgmma_commit();
    wait_out();
    pass_blocks(blocks_below(tile));
    store_out(load_tile<Config>(record()), q_.slot());  // again, rather than registers
    release_q(q_.slot());
    q_.advance();
    release_tile();
  }

  // The same beside the first scores of the next tile if this warpgroup has rows of that; `tile` becomes the next. Returns whether
  // its scores are there.
  __device__ __forceinline__ bool finish_into_next(Tile& tile) {
    if (storing_) release_q(previous_q());
    const Tile done = tile;
    const int done_q = q_.slot();
    q_.advance();
    int passed = Config::kLeft ? blocks_below(tile) : 0;
    tile = next_tile();
    const bool follows = tile.has_rows(warpgroup_);
    pass_k(passed);
    if (follows) {
      const int above = blocks_above(tile);
      passed += above;
      block_ = unit_blocks(tile).end - 1;
      pass_k(above);
      mbarrier_wait(shared_.q_loaded(warpgroup_, q_.slot()), q_.parity());
      mbarrier_wait(shared_.k_loaded(k_.slot()), k_.parity());
    }
    mbarrier_wait(shared_.v_loaded(v_.slot()), v_.parity());
    multiply_both();  // unless the tile follows, scores of whatever lies there: not used
    if (follows) release_k();
    wait_out();
    pass_v(passed);
    store_out(done, done_q);
    pass_turns(passed);
    storing_ = true;
    return follows;
  }

  // The descriptor of an operand. Those of 16 steps are more than the uniform registers hold: computed where they are used.
  __device__ __forceinline__ int64 operand(int offset) const {
    const int64 descriptor = operand_ + (offset >> 4);
    return Config::kHeadDim > 128 ? in_place(descriptor) : descriptor;
  }

  // S = Q Kᵀ (m64nNk16, both operands from shared memory).
  __device__ __forceinline__ void multiply_keys() {
    const int64 q = operand(Traits::q_offset(warpgroup_, q_.slot()));
    const int64 k = operand(Traits::k_offset(k_.slot()));
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      const int panel = step / 4, offset = step % 4 * (32 >> 4);  // 16 columns are 32 bytes
      wgmma_shared<Element>(scores_[0], q + (panel * (TileQ::kPanelBytes >> 4) + offset),
                            k + (panel * (TileK::kPanelBytes >> 4) + offset), step > 0);
    }
  }

  // O += P V (P from registers).
  __device__ __forceinline__ void multiply_probabilities() {
    const int64 v = operand(Traits::v_offset(v_.slot())) + panel_stride(TileV::kPanelBytes);
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step)
      wgmma_registers<Element>(out_[0], probabilities_[step], v + step * (16 * kPanelRowBytes >> 4));
  }

  // Both at once; only the scores are waited for. With turns one warpgroup at a time starts products, and passes its turn on when
  // its scores are there, not when they have been started: the softmax of one then lies beside the products of the others.
  __device__ __forceinline__ void multiply_both() {
    if constexpr (Config::kTurns) named_barrier_sync(1 + warpgroup_, 2 * kWarpgroupSize);
    hold_registers(scores_[0]);
    hold_registers(out_[0]);
    hold_registers(probabilities_);
    wgmma_fence();
    multiply_keys();
    wgmma_commit();
    multiply_probabilities();
    wgmma_commit();
    wgmma_wait<1>();
    hold_registers(scores_[0]);
    if constexpr (Config::kTurns) pass_turn();
  }
  __device__ __forceinline__ void wait_out() {
    wgmma_wait<0>();
    hold_registers(out_[0]);
    hold_registers(probabilities_);
    release_v();
  }

  // Every warpgroup takes one turn for each block of a tile, also for those it passes on.
  __device__ __forceinline__ void pass_turn() {
    named_barrier_arrive(1 + (warpgroup_ + 1) % Config::kWarpgroups, 2 * kWarpgroupSize);
  }
  __device__ __forceinline__ void pass_turns(int count) {
    if constexpr (Config::kTurns)
      for (int i = 0; i < count; ++i) {
        named_barrier_sync(1 + warpgroup_, 2 * kWarpgroupSize);
        pass_turn();
      }
  }

  // The products of block_ become scores; returns the factor that makes them logits of base 2.
  __device__ __forceinline__ float modify(const Tile& tile) {
    const int entry = Config::kVarlen ? min(tile.entry, params_.attention.batch - 1) : tile.entry;  // rows of none see no key
    const ScoreTile place{tile.first_row(params_, warpgroup_) + 16 * warp_, block_ * Config::kBlockN,
                          tile.query_head(params_, warpgroup_), entry};
    return modify_scores<Config>(scores_, params_.attention, tile.seqlen(params_.attention), place);
  }

  // Hides the keys of block_ that a row does not see.
  __device__ __forceinline__ void hide_keys(const Tile& known) {
    const AttentionParams& params = params_.attention;
    const Tile tile = Config::kFused ? known : load_tile<Config>(record());  // again, rather than registers
    const SeqlenInfo seqlen = tile.seqlen(params);
    const int first_row = tile.first_row(params_, warpgroup_) + 16 * warp_, first_key = block_ * Config::kBlockN;
    if constexpr (Traits::kHoles || Config::kLeft) {
      uint32 visible[2];
      visible_bits<Config, 1, Traits::kN>(visible, params, seqlen, tile.entry, tile.head, first_row, first_key);
      hide(scores_, visible);
    } else {  // those beyond the diagonal and beyond the end
      int visible[2];  // columns that each of the lane's rows sees, from its first one on
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int keys = seqlen.seqlen_k;
        if constexpr (Config::kCausal)
          keys = min(keys, first_row + row_of(0, 2 * half) + seqlen.seqlen_k - seqlen.seqlen_q + params.window_right + 1);
        visible[half] = keys - first_key - column_of(0, 0);
      }
#pragma unroll
      for (int j = 0; j < Traits::kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * j + e % 2 >= visible[e / 2]) scores_[0][j][e] = bits_float(0xff800000u);  // -inf
    }
  }

  __device__ __forceinline__ void store_out(const Tile& tile, int q_slot) {
    store_rows<Config>(params_, tile, warpgroup_, 16 * warp_, out_, softmax_,
                       shared_.q(warpgroup_, q_slot).base + 16 * warp_ * kPanelRowBytes);
  }

  // A warpgroup without rows for some blocks hands them on, in step with the others.
  __device__ __forceinline__ void pass_tile(const Tile& tile) {
    const KeyBlocks blocks = tile_blocks(tile);
    pass_blocks(blocks.end - blocks.first);
  }
  __device__ __forceinline__ void pass_blocks(int count) {
    for (int i = 0; i < count; ++i) {
      pass_k(1);
      pass_turns(1);
      pass_v(1);
    }
  }
  __device__ __forceinline__ void pass_k(int count) {
    for (int i = 0; i < count; ++i) {
      mbarrier_wait(shared_.k_loaded(k_.slot()), k_.parity());
      release_k();
    }
  }
  __device__ __forceinline__ void pass_v(int count) {
    for (int i = 0; i < count; ++i) {
      mbarrier_wait(shared_.v_loaded(v_.slot()), v_.parity());
      release_v();
    }
  }
  __device__ __forceinline__ void release_k() {
    arrive(shared_.k_released(k_.slot()));
    k_.advance();
  }
  __device__ __forceinline__ void release_v() {
    arrive(shared_.v_released(v_.slot()));
    v_.advance();
  }
  // Once the copy engine has read what lies there.
  __device__ __forceinline__ void release_q(int slot) {
    if (lane_id() == 0) {
      tma_store_wait_read();
      mbarrier_arrive(shared_.q_released(warpgroup_, slot));
    }
  }
  __device__ __forceinline__ int previous_q() const { return q_.slot() ^ 1; }
  // Once a warp.
  __device__ __forceinline__ static void arrive(SharedPtr barrier) {
    if (lane_id() == 0) mbarrier_arrive(barrier);
  }

  const ForwardSm90Params& params_;
  const Traits shared_;
  const int warpgroup_;
  const int warp_;  // of the warpgroup
  const int64 operand_;  // the start of shared memory as a descriptor: addresses in units of 16 bytes
  Ring<2> tiles_;
  Ring<Traits::kQSlots> q_;
  Ring<Config::kStages> k_, v_;
  int block_ = 0;  // of keys, counted from the first
  bool storing_ = false;  // the tile before may still be on its way out of its queries' place
  float scores_[1][Traits::kN][4];
  float out_[1][Traits::kNV][4];  // not yet normalised
  typename Softmax::Probabilities probabilities_;
  Softmax softmax_;
};

}  // namespace hfc
