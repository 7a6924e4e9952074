"""The model's tokenizer: byte-level BPE, so that any text comes back as it was."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
"""As embedding and LM head in one it takes 1.05 M of the model's 3.6 M parameters; half of it would need many more tokens."""
END = "<|endoftext|>"
"""Parts documents; id 0, the model's first and last token alike."""

# Numbers in single digits, words with the space before them, and indentation as tokens of its own.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer of `vocabulary` entries, `END` the first; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def configuration(context: int) -> dict[str, object]:
    """`tokenizer_config.json` for a model of `context` positions."""
    return {
        "bos_token": END,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
