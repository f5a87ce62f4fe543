"""FlashAttention for Hugging Face Transformers from CUDA C++ sources compiled at run time.

Importing this package makes ``attn_implementation="cupy_fa2"`` known to Transformers.
"""

__version__ = "0.1.0"  # first: the kernel cache is named after it

from .errors import CompilationError, MissingDependency, UnsupportedProblem
from .functional import explain, flash_attention, flash_attention_varlen, flash_attention_with_kvcache
from .integrations.alias import enable_flash_alias
from .integrations.transformers import register

__all__ = [
    "CompilationError",
    "MissingDependency",
    "UnsupportedProblem",
    "enable_flash_alias",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
]

register()
