"""Memory that is kept is another thread's: a private pool takes what its own thread allocates."""

from __future__ import annotations

import threading

import pytest

from hf_flash_cupy.lasting import on_another_thread


def test_another_thread_makes_it() -> None:
    assert on_another_thread(threading.get_ident) != threading.get_ident()


def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        on_another_thread(lambda: 1 // 0)
