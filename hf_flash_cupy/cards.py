"""What the data sheets say of known GPUs, and what an SM of each architecture holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU model."""

    name: str  # a part of the name the driver gives
    arch: str  # compute capability without the dot
    num_sms: int
    matrix_tflops: float  # dense 16-bit products with fp32 sums, TFLOP/s
    fp32_tflops: float  # fp32 outside matrix instructions, a multiply-add counted as two, TFLOP/s
    gigabytes_per_second: float  # of device memory


# NVIDIA's data sheets and architecture papers. First match wins: the longer name comes first.
CARDS = (
    Card("B200", "100", 148, 2250.0, 75.0, 8000.0),
    Card("H200", "90", 132, 989.4, 66.9, 4800.0),
    Card("H100 PCIe", "90", 114, 756.5, 51.2, 2039.0),
    Card("H100", "90", 132, 989.4, 66.9, 3352.0),
    Card("A100-SXM4-40GB", "80", 108, 311.9, 19.5, 1555.0),
    Card("A100", "80", 108, 311.9, 19.5, 2039.0),
    Card("L40S", "89", 142, 362.1, 91.6, 864.0),
    Card("L4", "89", 58, 121.0, 30.3, 300.0),
    Card("RTX A6000", "86", 84, 154.8, 38.7, 768.0),
    Card("A10", "86", 72, 125.0, 31.2, 600.0),
    Card("RTX 5090", "120", 170, 209.5, 104.8, 1792.0),
    Card("RTX 4090", "89", 128, 165.2, 82.6, 1008.0),
    Card("RTX 3090", "86", 82, 71.0, 35.6, 936.0),
    Card("T4", "75", 40, 65.0, 8.1, 320.0),
)

REGISTERS_PER_SM = 65536
_RESERVED = 1024  # bytes of shared memory the system takes for each thread block


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one SM (CUDA C++ Programming Guide, technical specifications)."""

    shared_bytes: int
    threads: int
    blocks: int


MULTIPROCESSORS = {
    "75": Multiprocessor(64 << 10, 1024, 16),
    "80": Multiprocessor(164 << 10, 2048, 32),
    "86": Multiprocessor(100 << 10, 1536, 16),
    "89": Multiprocessor(100 << 10, 1536, 24),
    "90": Multiprocessor(228 << 10, 2048, 32),
    "100": Multiprocessor(228 << 10, 2048, 32),
    "120": Multiprocessor(100 << 10, 1536, 24),
}


def find_card(name: str) -> Card | None:
    """The card whose name is a part of ``name``, as the driver gives it; None for one not listed.

    Case and spaces do not count.
    """
    return next((card for card in CARDS if _bare(card.name) in _bare(name)), None)


def _bare(name: str) -> str:
    return name.lower().replace(" ", "")


def card_of_arch(arch: str) -> Card | None:
    """A usual card of that compute capability, to explain a kernel without a GPU."""
    usual = {"80": "A100", "86": "A10", "90": "H200", "89": "L40S"}.get(arch)
    return next((card for card in CARDS if card.arch == arch and usual in (None, card.name)), None)


def blocks_per_sm(arch: str, threads: int, shared_bytes: int, registers: int | None) -> int:
    """Thread blocks of one kernel that fit an SM at once: the least of what each resource allows.

    ``registers``: of a thread, handed out to a warp in steps of 256; None leaves them out.
    """
    limits = MULTIPROCESSORS[arch]
    shared = limits.shared_bytes // (shared_bytes + (0 if arch == "75" else _RESERVED))
    allowed = [limits.blocks, limits.threads // threads, shared]
    if registers:
        of_warp = -(-registers * 32 // 256) * 256
        allowed.append(REGISTERS_PER_SM // of_warp // (threads // 32))
    return max(min(allowed), 0)
