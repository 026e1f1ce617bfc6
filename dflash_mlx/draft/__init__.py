"""Draft models, one file per family, and their checkpoints."""

from .checkpoint import load_draft, quantize
from .config import DraftConfig, parse_config
from .context import DraftContext
from .dflash import DFlashDraft, finite

__all__ = ["DFlashDraft", "DraftConfig", "DraftContext", "finite", "load_draft", "parse_config", "quantize"]
