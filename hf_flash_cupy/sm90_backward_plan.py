"""Plans of the backward kernels of compute capability 9.0: their struct, with its tensor maps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import sm90_backward, tensormap
from .launch import Launcher
from .params import BACKWARD_SM90_PARAMS
from .plans import POINTER_WORDS as ATTENTION_WORDS
from .plans import Geometry, attention_params
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
        self._num_tiles = _ATTENTION + _num_tiles_word()
        rows = m_blocks * geometry.num_heads * geometry.batch
        keys = n_blocks * geometry.num_heads_k * geometry.batch
        tiles = {"prepare": rows, "main": keys, "finish": rows}
        # Before the maps: a launcher gives its thread the device's context, without which the driver makes none.
        self.launchers = [Launcher(config, params, tiles[part], device) for part, config in configs.items()]
        self._boxes = sm90_backward.boxes(problem, geometry)
        on_host = device.type == "cpu"
        for name, box in self._boxes.items():
            self._write_map(name, tensormap.host_words(box) if on_host else tensormap.encode(box))
        self._patched = on_host or tensormap.address_is_a_word()

    def _write_map(self, name: str, words: tuple[int, ...]) -> None:
        for word, value in enumerate(words, _MAPS[name]):
            self._words[word] = value

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches on torch's current stream; the tensors, by their names in the struct, have the plan's geometry."""
        words = self._words
        for name, tensor in tensors.items():
            words[_WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        for name, box in self._boxes.items():
            address = words[_WORDS[name]]
            if self._patched:
                words[_MAPS[name] + tensormap.ADDRESS_WORD] = address
            else:
                self._write_map(name, tensormap.encode.__wrapped__(box, address))
        for launcher in self.launchers:
            words[self._num_tiles] = launcher.num_tiles
            launcher()


def _num_tiles_word() -> int:
    """Where the struct of attention has its number of thread blocks, in 8-byte words."""
    fields = BACKWARD_SM90_PARAMS["attention"].fields
    assert fields is not None
    return int(fields["num_tiles"][1]) // 8
