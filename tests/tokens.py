"""A tiny tokenizer: 97 tokens, some of them words, some single letters, one end-of-sequence token."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 2


def tiny_tokenizer(vocab_size: int = 97) -> TokenizerWrapper:
    words = ["<unk>", "<s>", "</s>"] + [f" w{i}" if i % 3 else chr(97 + i % 26) for i in range(3, vocab_size)]
    vocab = {}
    for i, word in enumerate(words):
        vocab[word if word not in vocab else f"{word}{i}"] = i
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    return TokenizerWrapper(fast)
