"""Draft models, one file per family, and their checkpoints."""

from .checkpoint import load_draft
from .config import DraftConfig, parse_config
from .context import DraftContext
from .dflash import DFlashDraft

__all__ = ["DFlashDraft", "DraftConfig", "DraftContext", "load_draft", "parse_config"]
