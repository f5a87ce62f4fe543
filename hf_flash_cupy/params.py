"""numpy structured dtypes that mirror the parameter structs of cuda_src/common/params.cuh.

Every generated unit asserts offsets, sizes and kinds, so that drift is a compile error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_POINTER = np.uint64

TENSOR_REF = np.dtype(
    [("data", _POINTER), ("batch_stride", np.int64), ("row_stride", np.int64), ("head_stride", np.int64)]
)

FORWARD_PARAMS = np.dtype(
    [
        ("q", TENSOR_REF),
        ("k", TENSOR_REF),
        ("v", TENSOR_REF),
        ("out", TENSOR_REF),
        ("lse", _POINTER),
        ("mask", _POINTER),
        ("key_intervals", _POINTER),
        ("cu_seqlens_q", _POINTER),
        ("cu_seqlens_k", _POINTER),
        ("lse_batch_stride", np.int64),
        ("lse_head_stride", np.int64),
        ("mask_batch_stride", np.int64),
        ("mask_head_stride", np.int64),
        ("mask_row_stride", np.int64),
        ("mask_col_stride", np.int64),
        ("interval_batch_stride", np.int64),
        ("interval_head_stride", np.int64),
        ("interval_row_stride", np.int64),
        ("num_tiles", np.int64),
        ("batch", np.int32),
        ("num_heads", np.int32),
        ("num_heads_k", np.int32),
        ("seqlen_q", np.int32),
        ("seqlen_k", np.int32),
        ("head_dim", np.int32),
        ("head_dim_v", np.int32),
        ("num_m_blocks", np.int32),
        ("heads_per_section", np.int32),
        ("window_left", np.int32),
        ("window_right", np.int32),
        ("score_scale_log2", np.float32),
        ("softcap", np.float32),
        ("softcap_inner", np.float32),
    ]
)

PARAMS: dict[str, np.dtype[Any]] = {"ForwardParams": FORWARD_PARAMS}
