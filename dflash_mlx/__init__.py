"""DFlash speculative decoding for MLX, a drop-in for mlx-lm: the same output in fewer target forwards."""

from .draft import DFlashDraft, convert_draft
from .errors import (
    CheckpointError,
    DFlashError,
    PairMismatchError,
    TargetStateError,
    UnknownPairError,
    UnsupportedOptionError,
    UnsupportedTargetError,
)
from .generate import GenerationResponse, generate, stream_generate
from .load import load, load_draft
from .prompt_cache import PromptCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from .speculative.sampling import make_sampler
from .speculative.statistics import Statistics
from .version import __version__

__all__ = [
    "CheckpointError",
    "DFlashDraft",
    "DFlashError",
    "GenerationResponse",
    "PairMismatchError",
    "PromptCache",
    "Statistics",
    "TargetStateError",
    "UnknownPairError",
    "UnsupportedOptionError",
    "UnsupportedTargetError",
    "__version__",
    "convert_draft",
    "generate",
    "load",
    "load_draft",
    "load_prompt_cache",
    "make_prompt_cache",
    "make_sampler",
    "save_prompt_cache",
    "stream_generate",
]
