"""Put shards that `dflash-mlx train data` wrote into one file of the repository's data.

python tools/default_draft/pack.py DIRECTORY tools/default_draft/data/conversations-00003.npz
"""

import sys
from pathlib import Path

from dflash_mlx.train.data import data_files, pack

directory, file = map(Path, sys.argv[1:])
if file.exists():
    sys.exit(f"{file} is there already; name a new one.")
print(f"{pack(data_files([directory]), file)} tokens in {file}")
