"""A quantized draft with full matrices, to train on from.

python tools/default_draft/dequantize.py DRAFT OUT
"""

import sys
from pathlib import Path

from mlx_lm.utils import dequantize_model

from dflash_mlx.draft import save_draft
from dflash_mlx.draft.checkpoint import read_draft

draft, raw = read_draft(Path(sys.argv[1]))
dequantize_model(draft)
save_draft(sys.argv[2], draft, {name: value for name, value in raw.items() if not name.startswith("quantization")})
