"""numpy structured dtypes that mirror the parameter structs of cuda_src/common/params.cuh.

Every generated unit asserts offsets, sizes and kinds, so that drift is a compile error.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

_POINTER = np.uint64

TENSOR_REF = np.dtype(
    [("data", _POINTER), ("batch_stride", np.int64), ("row_stride", np.int64), ("head_stride", np.int64)]
)

ATTENTION_PARAMS = np.dtype(
    [
        ("q", TENSOR_REF),
        ("k", TENSOR_REF),
        ("v", TENSOR_REF),
        ("out", TENSOR_REF),
        ("dout", TENSOR_REF),
        ("dq", TENSOR_REF),
        ("dk", TENSOR_REF),
        ("dv", TENSOR_REF),
        ("k_new", TENSOR_REF),
        ("v_new", TENSOR_REF),
        ("lse", _POINTER),
        ("dlse", _POINTER),
        ("delta", _POINTER),
        ("dq_accum", _POINTER),
        ("row_block_keys", _POINTER),
        ("out_accum", _POINTER),
        ("row_max", _POINTER),
        ("row_sum", _POINTER),
        ("split_parts", _POINTER),
        ("split_arrivals", _POINTER),
        ("mask", _POINTER),
        ("key_intervals", _POINTER),
        ("cu_seqlens_q", _POINTER),
        ("cu_seqlens_k", _POINTER),
        ("cache_seqlens", _POINTER),
        ("cache_batch_idx", _POINTER),
        ("cache_leftpad", _POINTER),
        ("block_table", _POINTER),
        ("bias", _POINTER),
        ("dbias", _POINTER),
        ("alibi_slopes", _POINTER),
        ("sinks", _POINTER),
        ("philox", _POINTER),
        ("lse_batch_stride", np.int64),
        ("lse_head_stride", np.int64),
        ("mask_batch_stride", np.int64),
        ("mask_head_stride", np.int64),
        ("mask_row_stride", np.int64),
        ("mask_col_stride", np.int64),
        ("bias_batch_stride", np.int64),
        ("bias_head_stride", np.int64),
        ("bias_row_stride", np.int64),
        ("bias_col_stride", np.int64),
        ("interval_batch_stride", np.int64),
        ("interval_head_stride", np.int64),
        ("interval_row_stride", np.int64),
        ("alibi_batch_stride", np.int64),
        ("block_table_stride", np.int64),
        ("num_tiles", np.int64),
        ("batch", np.int32),
        ("num_heads", np.int32),
        ("num_heads_k", np.int32),
        ("seqlen_q", np.int32),
        ("seqlen_k", np.int32),
        ("head_dim", np.int32),
        ("head_dim_v", np.int32),
        ("num_m_blocks", np.int32),
        ("num_n_blocks", np.int32),
        ("heads_per_section", np.int32),
        ("num_splits", np.int32),
        ("seqlen_new", np.int32),
        ("cache_batch", np.int32),
        ("page_size", np.int32),
        ("window_left", np.int32),
        ("window_right", np.int32),
        ("bias_batch", np.int32),
        ("bias_heads", np.int32),
        ("bias_rows", np.int32),
        ("bias_cols", np.int32),
        ("softmax_scale", np.float32),
        ("score_scale_log2", np.float32),
        ("softcap", np.float32),
        ("softcap_inner", np.float32),
        ("dropout_threshold", np.uint32),
        ("dropout_scale", np.float32),
    ]
)

TENSOR_MAP = np.dtype("V128")  # a CUtensorMap

FORWARD_SM90_PARAMS = np.dtype(
    [
        *((name, TENSOR_MAP) for name in ("q", "k", "v", "out")),
        ("attention", ATTENTION_PARAMS),
        ("tile_counter", _POINTER),
        ("group", np.int32),
        ("group_inverse", np.uint32),
        ("padding", f"V{64 - (ATTENTION_PARAMS.itemsize + 16) % 64}"),  # maps are aligned to 64 bytes
    ]
)

BACKWARD_SM90_PARAMS = np.dtype(
    [
        *((name, TENSOR_MAP) for name in ("q", "k", "v", "dout", "dk", "dv")),
        ("attention", ATTENTION_PARAMS),
        ("row_statistics", _POINTER),
        ("dq_turns", _POINTER),
        ("row_intervals", _POINTER),
        ("padding", f"V{64 - (ATTENTION_PARAMS.itemsize + 24) % 64}"),
    ]
)

PARAMS: dict[str, np.dtype[Any]] = {
    "AttentionParams": ATTENTION_PARAMS,
    "ForwardSm90Params": FORWARD_SM90_PARAMS,
    "BackwardSm90Params": BACKWARD_SM90_PARAMS,
}


class Run:
    """Neighbouring fields of a struct, written together: record arrays of numpy take microseconds for each field."""

    def __init__(self, dtype: np.dtype[Any], *names: str) -> None:
        """``names`` as "batch", or "q.row_stride" for a field of a field; in the order of the struct."""
        fields = [_field(dtype, name) for name in names]
        self._offset = fields[0][1]
        self._struct = struct.Struct("=" + "".join(_FORMATS[kind] for kind, _ in fields))
        end = self._offset
        for name, (kind, offset) in zip(names, fields, strict=True):
            if offset != end:
                raise ValueError(f"{name} does not follow the field before it.")
            end += struct.calcsize("=" + _FORMATS[kind])

    def write(self, raw: bytearray, *values: float) -> None:
        self._struct.pack_into(raw, self._offset, *values)


_FORMATS = {"uint64": "Q", "int64": "q", "int32": "i", "uint32": "I", "float32": "f"}


def _field(dtype: np.dtype[Any], name: str) -> tuple[str, int]:
    """Type and offset."""
    begin = 0
    for part in name.split("."):
        assert dtype.fields is not None
        dtype, offset = dtype.fields[part][:2]
        begin += offset
    return dtype.name, begin
