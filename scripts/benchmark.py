#!/usr/bin/env python
"""``hf-flash-cupy bench`` from a checkout, installed or not: the same options, the same exit codes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hf_flash_cupy.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
