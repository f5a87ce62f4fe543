"""Plans of the backward kernels of compute capability 9.0: their struct, with its tensor maps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import sm90_backward, tensormap
from .launch import Launcher
from .params import BACKWARD_SM90_PARAMS
from .plans import NUM_TILES_WORD, Geometry, attention_params
from .plans import POINTER_WORDS as ATTENTION_WORDS
from .problem import AttentionProblem, KernelConfig

_FIELDS = BACKWARD_SM90_PARAMS.fields
assert _FIELDS is not None
_MAPS = {name: _FIELDS[name][1] // 8 for name in ("q", "k", "v", "dout", "dk", "dv")}  # in 8-byte words
_ATTENTION = _FIELDS["attention"][1] // 8
_WORDS = {name: _ATTENTION + word for name, word in ATTENTION_WORDS.items()}
_WORDS |= {name: _FIELDS[name][1] // 8 for name in ("row_statistics", "dq_turns", "row_intervals")}


class BackwardSm90Plan:
    """As :class:`hf_flash_cupy.plans.Plan`: one geometry, ready to launch, for one thread."""

    def __init__(
        self,
        configs: dict[str, KernelConfig],
        problem: AttentionProblem,
        geometry: Geometry,
        device: torch.device,
    ) -> None:
        """``configs``: those of :func:`hf_flash_cupy.sm90_backward.select`."""
        self.config = configs["main"]
        m_blocks, n_blocks = sm90_backward.num_blocks(problem, geometry)
        params = np.zeros(1, BACKWARD_SM90_PARAMS)
        params["attention"] = attention_params(geometry, problem)
        params["attention"]["num_m_blocks"] = m_blocks
        params["attention"]["num_n_blocks"] = n_blocks
        params["attention"]["heads_per_section"] = sm90_backward.heads_per_section(problem, geometry)
        self._words = memoryview(params.view(np.uint8).data).cast("Q")
        rows = m_blocks * geometry.num_heads * geometry.batch
        keys = n_blocks * geometry.num_heads_k * geometry.batch
        tiles = {"prepare": rows, "main": keys, "finish": rows}
        # Before the maps: a launcher gives its thread the device's context, without which the driver makes none.
        self.launchers = [Launcher(config, params, tiles[part], device) for part, config in configs.items()]
        boxes = sm90_backward.boxes(problem, geometry)
        self._maps = tensormap.Maps(self._words, _MAPS, boxes, device.type == "cpu")

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches on torch's current stream; the tensors, by their names in the struct, have the plan's geometry."""
        words = self._words
        for name, tensor in tensors.items():
            words[_WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        for name in _MAPS:
            self._maps.move(name, words[_WORDS[name]])
        for launcher in self.launchers:
            words[_ATTENTION + NUM_TILES_WORD] = launcher.num_tiles
            launcher()
