"""A checkpoint loads whole or not at all: missing, unexpected or misshapen tensors are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..errors import CheckpointError, UnsupportedOptionError
from ..machine import native_bfloat16
from . import speculators
from .config import ARCHITECTURES, DraftConfig, parse_config
from .dflash import DFlashDraft
from .domino import DominoHead

SUFFIXES = ("weight", "scales", "biases", "bias")
# Where packagings put a Domino head.
CONTAINERS = ("logit_head.", "logits_correction.")
# The authors' names of its parts, and ours.
DOMINO = {
    f"prefix_gru.{suffix}_{theirs}_l0": f"domino.{ours}.{suffix}"
    for suffix in SUFFIXES
    for theirs, ours in (("ih", "input_gates"), ("hh", "state_gates"))
}
DOMINO |= {
    f"embed_proj.{theirs}.{suffix}": f"domino.{ours}.{suffix}"
    for suffix in SUFFIXES
    for theirs, ours in (("0", "narrow"), ("2", "widen"))
}
# The names of an older training, whose recurrent network starts from a vector that it learned.
DOMINO["domino_start"] = "domino.start"
OLDER_DOMINO = {"domino_gru": "prefix_gru", "domino_head.W1": "embed_proj.0", "domino_head.W2": "embed_proj.2"}
# Tables that are published without the suffix of a module's weight.
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
CHOOSERS = ("domino", "candidate_selector")  # our names of what chooses tokens behind the network
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
AGAIN = "download the draft again"


def load_draft(
    path_or_repo: str | Path, *, dtype: mx.Dtype | None = None, bits: int | None = None, group_size: int = 64
) -> DFlashDraft:
    """Load a DFlash draft in the published format (config.json and safetensors, whole or sharded).

    path_or_repo: a local directory, else a repository on the model hub. dtype: of its floating-point weights, and so of
    its activations; None keeps the file's, except that half precision becomes float32 where the device has no native
    bfloat16: on a CPU its matmuls are tens of times slower, in float16 drafts lose acceptance. For the same reason a
    CPU dequantizes, unless a dtype is given: of 8 rows its quantized matmuls take 8 times as long. bits: quantize it,
    in groups of `group_size`. CheckpointError names what is missing, damaged or unknown.
    """
    check_options(dtype, bits, group_size)
    draft, _ = read_draft(path_or_repo)
    if dtype is None and bits is None and mx.default_device() == mx.cpu:
        dequantize_model(draft)
    if dtype is None and draft.dtype != mx.float32 and not native_bfloat16():
        dtype = mx.float32
    if dtype is not None:
        draft.set_dtype(dtype)
    if bits is not None:
        quantize(draft, bits, group_size)
    mx.eval(draft.parameters())
    return draft


def check_options(dtype: Any, bits: Any, group_size: Any) -> None:
    """UnsupportedOptionError for a type or a quantization that no draft can have."""
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedOptionError(
            f"dtype is {dtype!r}; use mx.float16, mx.bfloat16 or mx.float32, or leave it out for the file's."
        )
    for name, value, known in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        wrong = isinstance(value, bool) or not isinstance(value, int) or value not in known
        if wrong and not (name == "bits" and value is None):
            raise UnsupportedOptionError(f"{name} is {value!r}; use one of {', '.join(map(str, known))}.")


def read_draft(path_or_repo: str | Path) -> tuple[DFlashDraft, dict[str, Any]]:
    """A draft in the types that its files hold, lazy, and its config as written."""
    path = _resolve(path_or_repo)
    raw = _read_json(path / "config.json")
    _refuse_whole_model(raw, path)
    config = parse_config(raw, str(path / "config.json"))
    quantization = _quantization(raw, path)
    tensors = _read_weights(path)
    weights = published_names(tensors)
    if len(weights) < len(tensors):
        raise CheckpointError(f"{path} holds a tensor under two names ({_twice(tensors)}); {AGAIN}.")
    token_ids = _token_ids(weights, config, path)
    weights = _uniform_kv(weights, config, quantization, path)
    draft = _build(DFlashDraft(config, token_ids), weights, quantization, path)
    _check_tensors(draft, weights, path)
    draft.load_weights(list(stack(weights, config).items()))
    draft.eval()
    return draft, raw


def quantize(draft: DFlashDraft, bits: int, group_size: int = 64) -> None:
    """Quantize a draft's matrices in place, as mlx-lm's conversion does; activations keep their type.

    What does not divide into groups stays as it is, and so does what chooses tokens behind the network: of that only
    single rows are read.
    """
    check_options(None, bits, group_size)
    if "scales" in draft.kv_proj:
        raise UnsupportedOptionError(
            f"This draft is quantized already, at {draft.kv_proj.bits} bits; load it as it is."
        )

    def chosen(name: str, module: nn.Module) -> bool:
        if not hasattr(module, "to_quantized") or name.startswith(CHOOSERS):
            return False
        return name == "kv_proj" or module.weight.shape[-1] % group_size == 0

    try:
        nn.quantize(draft, group_size=group_size, bits=bits, class_predicate=chosen)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedOptionError(
            f"This draft cannot be quantized to {bits} bits in groups of {group_size} ({_first_line(error)}); "
            "leave out bits (--draft-bits), or give load_draft a group_size that divides its widths."
        ) from error
    mx.eval(draft.parameters())


def stack(weights: dict[str, mx.array], config: DraftConfig) -> dict[str, mx.array]:
    """Published names to ours: the K/V projections of all layers become one, row after row, and so do the key norms."""
    weights = dict(weights)
    weights["k_norm.weight"] = mx.stack([weights.pop(name) for name in _k_norm_names(config)])
    for suffix in SUFFIXES:
        parts = [weights.pop(f"{name}.{suffix}", None) for name in kv_names(config)]
        if parts[0] is not None:
            weights[f"kv_proj.{suffix}"] = mx.concatenate(parts)
    return {f"{name}.weight" if name in CODEBOOKS else DOMINO.get(name, name): x for name, x in weights.items()}


def unstack(weights: dict[str, mx.array], config: DraftConfig) -> dict[str, mx.array]:
    """Our names to the published ones; the inverse of `stack`."""
    weights = dict(weights)
    weights |= dict(zip(_k_norm_names(config), weights.pop("k_norm.weight"), strict=True))
    rows = config.num_key_value_heads * config.head_dim
    for suffix in SUFFIXES:
        stacked = weights.pop(f"kv_proj.{suffix}", None)
        if stacked is not None:
            for i, name in enumerate(kv_names(config)):
                weights[f"{name}.{suffix}"] = stacked[i * rows : (i + 1) * rows]
    return published_names(weights)


def published_names(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Names that packagings write in several ways, in the authors' way."""
    names = {f"{name}.weight": name for name in CODEBOOKS if f"{name}.scales" not in weights}
    names |= {ours: theirs for theirs, ours in DOMINO.items()}
    names |= {f"{container}{name}": name for container in CONTAINERS for name in DOMINO}
    names |= {
        name.replace(theirs, older): name
        for name in DOMINO
        for older, theirs in OLDER_DOMINO.items()
        if name.startswith(f"{theirs}.")
    }
    return {names.get(name, name): x for name, x in weights.items()}


def kv_names(config: DraftConfig) -> list[str]:
    """The published names of the stacked projections, in the order of their rows."""
    return [f"layers.{i}.self_attn.{part}_proj" for i in range(config.num_hidden_layers) for part in "kv"]


def _k_norm_names(config: DraftConfig) -> list[str]:
    return [f"layers.{i}.self_attn.k_norm.weight" for i in range(config.num_hidden_layers)]


def _resolve(path_or_repo: str | Path) -> Path:
    path = Path(path_or_repo).expanduser()
    if str(path_or_repo) and path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json and the safetensors.")
    try:
        return Path(snapshot_download(str(path_or_repo), allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:  # the hub's client has many kinds of error, all of them of these two
        raise CheckpointError(
            f"Draft {str(path_or_repo)!r} is neither a local directory nor a reachable model repository "
            f"({type(error).__name__}: {_first_line(error)}); check the path or the name."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {AGAIN} or check the path.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {AGAIN}.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__} instead of an object; {AGAIN}.")
    return raw


def is_draft(raw: dict[str, Any]) -> bool:
    """Whether a config is of a draft, known here or not, rather than of a whole model."""
    return any(key in raw for key in ("dflash_config", "target_layer_ids", "speculators_model_type")) or any(
        "Draft" in name or name in ARCHITECTURES for name in _architectures(raw)
    )


def _architectures(raw: dict[str, Any]) -> list[str]:
    names = raw.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _refuse_whole_model(raw: dict[str, Any], path: Path) -> None:
    if not is_draft(raw):
        kind = ", ".join(_architectures(raw)) or str(raw.get("model_type", "model of unknown kind"))
        raise CheckpointError(f"{path} holds a {kind}, not a DFlash draft; give it as the target model instead.")


def _read_weights(path: Path) -> dict[str, mx.array]:
    index = path / "model.safetensors.index.json"
    named: dict[str, str] = {}
    if index.exists():
        named = _read_json(index).get("weight_map") or {}
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise CheckpointError(f"{index} has no usable weight_map; {AGAIN}.")
    files = [path / name for name in sorted(set(named.values()))]
    files = files or sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no safetensors file; {AGAIN}.")
    if missing := [file.name for file in files if not file.exists()]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}, which its index names; {AGAIN}.")
    weights: dict[str, mx.array] = {}
    for file in files:
        loaded = _read_safetensors(file)
        if twice := sorted(weights.keys() & loaded.keys()):
            raise CheckpointError(f"{file} holds tensors that another file holds too ({_some(twice)}); {AGAIN}.")
        weights |= loaded
    return weights


def _read_safetensors(file: Path) -> dict[str, mx.array]:
    try:
        return mx.load(str(file))
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({_first_line(error)}); {AGAIN}.") from error


def _quantization(raw: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """mlx's own description of quantized weights; another packaging's is refused."""
    where = f"{path / 'config.json'}: quantization"
    quantization = raw.get("quantization")
    foreign = raw.get("quantization_config")
    if quantization is None and isinstance(foreign, dict) and "quant_method" in foreign:
        raise CheckpointError(f"{where} is {foreign['quant_method']!r}, known is mlx's; use an mlx conversion.")
    quantization = quantization or foreign or None
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where} is {quantization!r}, an object is needed; {AGAIN}.")
    if quantization.get("mode", "affine") == "affine":
        for key in ("group_size", "bits"):
            value = quantization.get(key)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{where}.{key} is {value!r}, a number is needed; {AGAIN}.")
    return quantization


def _options(quantization: dict[str, Any]) -> dict[str, Any]:
    return {key: quantization[key] for key in ("group_size", "bits", "mode") if key in quantization}


def _options_of(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """How a module is quantized: its own entry, else the file's."""
    entry = quantization.get(name)
    return _options(entry if isinstance(entry, dict) else quantization)


def _uniform_kv(
    weights: dict[str, mx.array], config: DraftConfig, quantization: dict[str, Any] | None, path: Path
) -> dict[str, mx.array]:
    """K/V projections quantized in different ways cannot be rows of one matrix: they are dequantized."""
    names = kv_names(config)
    quantized = [name for name in names if f"{name}.scales" in weights]
    if quantization is None or not quantized:
        return weights
    kinds = [_options_of(quantization, name) for name in names]
    if len(quantized) == len(names) and all(kind == kinds[0] for kind in kinds):
        return weights
    weights = dict(weights)
    for name in quantized:
        parts = [weights.pop(f"{name}.{suffix}", None) for suffix in ("weight", "scales", "biases")]
        try:
            weights[f"{name}.weight"] = mx.dequantize(*parts, **_options_of(quantization, name))
        except (ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: {name} does not fit its quantization ({_first_line(error)}); {AGAIN}."
            ) from error
    return weights


def _build(
    draft: DFlashDraft, weights: dict[str, mx.array], quantization: dict[str, Any] | None, path: Path
) -> DFlashDraft:
    """The module that the tensors belong to: with its own embedding and head, and quantized, where they are there."""
    config, columns = draft.config, draft.config.hidden_size
    if "embed_tokens.weight" in weights:
        draft.embed_tokens = nn.Embedding(config.vocab_size, columns)
    if "lm_head.weight" in weights:
        rows = config.draft_vocab_size or config.vocab_size
        draft.lm_head = nn.Linear(columns, rows, bias="lm_head.bias" in weights)
    if config.domino is not None:
        biased = [ours.split(".")[1] for theirs, ours in DOMINO.items() if ours.endswith(".bias") and theirs in weights]
        draft.domino = DominoHead(config, biased, learned_start="domino_start" in weights)
    if quantization is None:
        return draft

    def options(name: str, module: nn.Module) -> Any:
        published = kv_names(config)[0] if name == "kv_proj" else name
        scales = next((theirs for theirs, ours in DOMINO.items() if ours == f"{name}.scales"), f"{published}.scales")
        if not hasattr(module, "to_quantized") or scales not in weights:
            return False
        return _options_of(quantization, published)

    try:
        nn.quantize(draft, class_predicate=options)
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be quantized as its config says ({_first_line(error)}); {AGAIN}."
        ) from error
    return draft


def _token_ids(weights: dict[str, mx.array], config: DraftConfig, path: Path) -> mx.array | None:
    """The tokens of a draft's own, smaller vocabulary; drops what only its training needed."""
    for name in speculators.VERIFIER_TENSORS:
        weights.pop(name, None)
    ids = speculators.token_ids(weights, config.vocab_size, str(path))
    size = None if ids is None else ids.size
    if size != config.draft_vocab_size and not (config.draft_vocab_size is None and size == config.vocab_size):
        found = "there is no d2t" if size is None else f"d2t has {size} entries"
        wanted = config.draft_vocab_size or config.vocab_size
        raise CheckpointError(f"{path}: draft_vocab_size is {wanted} but {found}; {AGAIN}.")
    return ids if config.draft_vocab_size is not None else None


def _check_tensors(draft: DFlashDraft, weights: dict[str, mx.array], path: Path) -> None:
    """Compare with what the config promises, under the published names."""
    wanted = unstack(dict(tree_flatten(draft.parameters())), draft.config)
    missing, unexpected = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    common = sorted(wanted.keys() & weights.keys())
    problems = [f"missing {_some(missing)}"] if missing else []
    problems += [f"unexpected {_some(unexpected)}"] if unexpected else []
    problems += [
        f"{name} is {weights[name].shape} instead of {wanted[name].shape}"
        for name in common
        if weights[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} is of {weights[name].dtype}"
        for name in common
        if mx.issubdtype(wanted[name].dtype, mx.floating) and not mx.issubdtype(weights[name].dtype, mx.floating)
    ]
    if problems:
        raise CheckpointError(
            f"The tensors of {path} do not fit its config ({'; '.join(problems)}); "
            "download the draft again or use the version that made it."
        )


def _twice(weights: dict[str, mx.array]) -> str:
    names = {name: next(iter(published_names({name: x}))) for name, x in weights.items()}
    return _some(sorted(name for name, theirs in names.items() if name != theirs and theirs in weights))


def _some(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
