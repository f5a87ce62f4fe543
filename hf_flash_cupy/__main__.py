"""``python -m hf_flash_cupy`` is the ``hf-flash-cupy`` command."""

from hf_flash_cupy.cli import main

main()
