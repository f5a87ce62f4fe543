"""Helper modules of this folder, importable here and in the processes that the tests start."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
for folder in (FOLDER, FOLDER.parent / "attention"):
    sys.path.insert(0, str(folder))
