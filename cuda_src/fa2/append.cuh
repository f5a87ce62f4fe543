// Writes new keys and values behind those of a cache, in place.
#pragma once

#include "common/params.cuh"
#include "fa2/cache.cuh"
#include "isa.cuh"
#include "tile/copy.cuh"

namespace hfc {

template <typename Config>
__device__ __forceinline__ void append_row(typename Config::Element* target, const typename Config::Element* source,
                                           int columns) {
  constexpr int kColumns = 16 / sizeof(typename Config::Element);
  for (int column = lane_id() * kColumns; column < columns; column += kWarpSize * kColumns) {
    if constexpr (Config::kVector)
      store_global_chunk(target + column, load_global_chunk(source + column));
    else
      store_elements(target + column, load_elements(source + column, columns - column), columns - column);
  }
}

// A warp writes one key and value of one head. What would not fit the cache is left out.
template <typename Config>
__device__ __forceinline__ void fa2_append(const AttentionParams& params) {
  using Element = typename Config::Element;
  if (block_id() >= params.num_tiles) return;
  const DivMod head = divmod(block_id() * Config::kNumWarps + warp_id(), params.num_heads_k);
  const DivMod row = divmod(head.quotient, params.seqlen_new);
  if (row.quotient >= params.batch) return;
  const int entry = int(row.quotient), head_k = int(head.remainder);
  const CacheRows<Config> cache(params, entry);
  const int64 index = cache.length() + row.remainder;
  if (cache.absent() || index >= params.seqlen_k) return;
  auto source = [&](const TensorRef& tensor) {
    return static_cast<const Element*>(tensor.data) + entry * tensor.batch_stride + row.remainder * tensor.row_stride +
           head_k * tensor.head_stride;
  };
  append_row<Config>(cache.template row<Element>(params.k, head_k, int(index)), source(params.k_new), params.head_dim);
  append_row<Config>(cache.template row<Element>(params.v, head_k, int(index)), source(params.v_new), params.head_dim_v);
}

}  // namespace hfc
