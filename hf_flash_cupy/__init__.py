"""FlashAttention for Hugging Face Transformers from CUDA C++ sources compiled at run time."""

from .errors import CompilationError, MissingDependency, UnsupportedProblem
from .functional import explain, flash_attention, flash_attention_varlen

__version__ = "0.1.0"
__all__ = [
    "CompilationError",
    "MissingDependency",
    "UnsupportedProblem",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
]
