"""flash-attn's own tests on this package's kernels: ``python tests/flash_attn/run.py PATH/test_flash_attn.py``.

PATH is tests/test_flash_attn.py of a checkout of Dao-AILab/flash-attention. Options: ``--cases``, ``--seed``; whatever
else is given goes to pytest (``-n 8``, ``--collect-only``, ``-k varlen``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    files = [argument for argument in arguments if argument.endswith(".py")]
    if len(files) != 1 or not Path(files[0]).is_file():
        print(__doc__)
        return 2
    for path in (HERE, HERE.parents[1]):
        sys.path.insert(0, str(path))  # the plugin, and a checkout that is not installed
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:2], os.environ.get("PYTHONPATH")]))
    own = ["-p", "flash_attn_sample", "-c", os.devnull, "--import-mode=importlib", "--rootdir"]
    return int(pytest.main([*own, str(Path(files[0]).parent), "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
