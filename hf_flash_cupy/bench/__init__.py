"""Measurements of attention kernels against their peers: every peer of a row in one process, in balanced orders."""
