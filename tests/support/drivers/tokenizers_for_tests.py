"""Small real tokenizers, built in the test run."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meridian_patch.phase.sequences import Vocabulary

# How GPT-4 and Qwen split text: punctuation keeps the line breaks behind it.
_SPLIT = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\p{L}+|\p{N}|\s+"
_CORPUS = ["so.</think>\n\nIt is.</think>\nNo </think>\nYes\n</think>x </think>\n"] * 50


def merging_bpe() -> Tokenizer:
    """A byte-level BPE for which ``</think>`` is three tokens that merge with what is around."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def word_bpe() -> Tokenizer:
    """A byte-level BPE that has ``Wait`` as two entries: behind a space, and elsewhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["Wait no Wait\nWait"] * 50, trainer)
    return tokenizer


def prefixing_words(words: list[str]) -> Tokenizer:
    """One token per text, which it puts an underscore before; all other texts are unknown."""
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Prepend("_")
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        token_id=tokenizer.token_to_id,
        added_ids=frozenset(tokenizer.get_added_tokens_decoder()),
    )
