"""Draft models, one file per family, and their checkpoints."""

from .checkpoint import load_draft, quantize
from .config import DraftConfig, parse_config
from .context import DraftContext
from .dflash import DFlashDraft, finite
from .drafted import Correction, Drafted
from .save import convert_draft, save_draft

__all__ = [
    "Correction",
    "DFlashDraft",
    "DraftConfig",
    "DraftContext",
    "Drafted",
    "convert_draft",
    "finite",
    "load_draft",
    "parse_config",
    "quantize",
    "save_draft",
]
