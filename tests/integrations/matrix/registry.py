"""Every row of the matrix, and what of an outcome is kept."""

from __future__ import annotations

from typing import Any

from . import decoders, encoders, images, multimodal, speech
from .rows import Row
from .runner import Outcome

GROUPS = {
    "decoder": decoders.ROWS,
    "encoder, encoder-decoder": encoders.ROWS,
    "image, video": images.ROWS,
    "audio": speech.ROWS,
    "text with images": multimodal.ROWS,
}
ROWS: dict[str, Row] = {row.name: row for rows in GROUPS.values() for row in rows}


def group_of(name: str) -> str:
    return next(group for group, rows in GROUPS.items() if any(row.name == name for row in rows))


def as_record(outcome: Outcome) -> dict[str, Any]:
    """One outcome as JSON."""
    seen = outcome.seen
    return {
        "name": outcome.row.name,
        "group": group_of(outcome.row.name),
        "accelerated": seen.accelerated,
        "equal": outcome.equal,
        "heads": [str(d) if d == v else f"{d}/{v}" for d, v in sorted(seen.heads)],
        "masks": sorted(seen.masks),
        "features": sorted(seen.features),
        "own": sorted(seen.others),
        "pools": sorted(seen.pools),
        "modes": outcome.modes,
        "note": outcome.row.note,
    }


def failed_record(name: str, error: Exception) -> dict[str, Any]:
    """The record of a row whose models could not be built."""
    return as_record(Outcome(ROWS[name], {"build": f"raises {type(error).__name__}: {str(error)[:200]}"}))
