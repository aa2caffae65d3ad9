"""Vocabularies of GGUF files cut text as the models' own tokenizers do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry_engine.errors import UnsupportedModelError, WeightsInvalidError
from kvferry_engine.loader.gguf_tokenizer import GgufVocabulary, merges_from_scores, tokenizer_json
from kvferry_engine.loader.pre_tokenizers import PRE_TOKENIZERS
from kvferry_engine.loader.source import open_source
from loader.tiny_checkpoints import TINY, tiny_tensors, write_gguf

TEXT = "It's 12345 cafés, don't\n\n  x+=1;\tΩmega 漢字 🎉 HelloWorld's ½"


def pieces(name: str, text: str) -> list[str]:
    """The pieces a pre-tokenizer cuts ASCII text into, spaces back in place."""
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[name].spec(),
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    decoder = decoders.ByteLevel()
    return [decoder.decode([piece]) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_text_is_lost(name: str) -> None:
    assert "".join(pieces(name, "It's 12345, don't\n\n  x+=1;\tA B`c`")) == "It's 12345, don't\n\n  x+=1;\tA B`c`"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "in 2024 we", ["in", " ", "2", "0", "2", "4", " we"]),
        ("gpt-2", "in 20245 we're", ["in", " 20245", " we", "'re"]),
        ("qwen2", "in 2024 WE'RE", ["in", " ", "2", "0", "2", "4", " WE", "'RE"]),
        ("llama-bpe", "in 20245 ok", ["in", " ", "202", "45", " ok"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("default", "a 123456!", ["a", " ", "123", "456", "!"]),
        ("default", "x=='y'", ["x", "=='", "y", "'"]),
    ],
)
def test_digits_words_and_contractions_are_cut_as_the_model_learnt_them(
    name: str, text: str, expected: list[str]
) -> None:
    assert pieces(name, text) == expected


def test_smollm_pieces_equal_digits_and_byte_level() -> None:
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    decoder = decoders.ByteLevel()

    assert pieces("smollm", TEXT) == [decoder.decode([piece]) for piece, _ in original.pre_tokenize_str(TEXT)]


def test_gpt2_pieces_equal_byte_level() -> None:
    original = pre_tokenizers.ByteLevel(add_prefix_space=False)
    decoder = decoders.ByteLevel()

    assert pieces("gpt-2", TEXT) == [decoder.decode([piece]) for piece, _ in original.pre_tokenize_str(TEXT)]


def gguf_assets(tmp_path: Path, metadata: Callable[[GGUFWriter], None]) -> tuple[Tokenizer, object]:
    assets = open_source(str(write_gguf(tmp_path / "m.gguf", TINY, tiny_tensors(TINY), metadata=metadata))).assets()
    return Tokenizer.from_buffer(assets.tokenizer_json), assets


def test_special_tokens_are_found_in_text_and_hidden_on_decoding(tmp_path: Path) -> None:
    tokenizer, _ = gguf_assets(tmp_path, lambda writer: None)
    ids = tokenizer.encode("<s>AB</s>").ids

    assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "AB"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>AB</s>"


@pytest.mark.parametrize("adds", [True, False])
def test_bos_and_eos_are_added_when_the_file_says_so(tmp_path: Path, adds: bool) -> None:
    def metadata(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(adds)
        writer.add_add_eos_token(adds)

    tokenizer, assets = gguf_assets(tmp_path, metadata)
    ids = tokenizer.encode("A").ids

    assert (ids[0] == 1, ids[-1] == 2) == (adds, adds)
    assert assets.add_bos_token is adds  # type: ignore[attr-defined]
    assert tokenizer.encode("A", add_special_tokens=False).ids == (ids[1:-1] if adds else ids)


def test_named_templates_and_turn_ends_reach_the_bundle(tmp_path: Path) -> None:
    def metadata(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
        writer.add_eot_token_id(0)

    _, assets = gguf_assets(tmp_path, metadata)

    assert assets.chat_templates == {"default": "a", "tool_use": "b"}  # type: ignore[attr-defined]
    assert (assets.eos_token_id, assets.extra_eos_token_ids) == (2, [0])  # type: ignore[attr-defined]


def test_an_unknown_pre_tokenizer_lists_the_known_ones(tmp_path: Path) -> None:
    def metadata(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.pre"]
        writer.add_tokenizer_pre("klingon")

    with pytest.raises(UnsupportedModelError, match=r"klingon is not supported; supported: .*smollm"):
        gguf_assets(tmp_path, metadata)


def test_merges_that_are_no_pairs_are_damage(tmp_path: Path) -> None:
    def metadata(writer: GGUFWriter) -> None:
        writer.add_token_merges(["ab"])

    with pytest.raises(WeightsInvalidError, match=re.escape("'ab' in tokenizer.ggml.merges is not a pair")):
        gguf_assets(tmp_path, metadata)


def spm_vocabulary(**changes: object) -> GgufVocabulary:
    """A SentencePiece-style vocabulary: specials, 256 bytes, letters, and a few merged pieces by score."""
    merged = ["▁t", "he", "▁the", "in", "ing"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *merged, *letters, "<|x|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(letters)), 4]
    values: dict[str, object] = {
        "kind": "llama",
        "pre": "default",
        "tokens": tokens,
        "types": types,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(merged) + len(letters))] + [0.0],
        "merges": [],
        "bos_id": 1,
        "eos_id": 2,
        "unknown_id": 0,
        "padding_id": None,
        "adds_bos": True,
        "adds_eos": False,
        "adds_space_prefix": True,
        "turn_end_ids": [],
    }
    return GgufVocabulary(**{**values, **changes})  # type: ignore[arg-type]


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes() -> None:
    vocabulary = spm_vocabulary()
    tokenizer = Tokenizer.from_buffer(tokenizer_json(vocabulary))

    encoding = tokenizer.encode("the thing é<|x|>a")

    assert encoding.tokens == [
        *["<s>", "▁the", "▁t", "h", "ing", "▁", "<0xC3>", "<0xA9>"],
        *["<|x|>", "▁", "a"],
    ]
    assert tokenizer.decode(tokenizer.encode("the thing é").ids) == "the thing é"


def test_a_sentencepiece_vocabulary_equals_the_one_transformers_would_build() -> None:
    vocabulary = spm_vocabulary()
    vocab = {piece: i for i, piece in enumerate(vocabulary.tokens)}
    oracle = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges_from_scores(vocabulary), unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    oracle.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ours = Tokenizer.from_buffer(tokenizer_json(vocabulary))

    for text in ("the thing", "  in   the", "ßx", ""):
        assert ours.encode(text, add_special_tokens=False).ids == oracle.encode(text).ids


def test_without_space_prefix_text_starts_as_it_is() -> None:
    tokenizer = Tokenizer.from_buffer(tokenizer_json(spm_vocabulary(adds_space_prefix=False)))

    assert tokenizer.encode("the").tokens == ["<s>", "t", "he"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_a_vocabulary_without_scores_and_merges_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="neither merges nor scores"):
        tokenizer_json(spm_vocabulary(scores=[]))


def test_unused_entries_are_no_tokens_and_of_doubles_the_first_counts() -> None:
    vocabulary = spm_vocabulary()
    vocabulary.tokens.extend(["[PAD]", "a"])
    vocabulary.types.extend([int(TokenType.UNUSED), int(TokenType.NORMAL)])
    vocabulary.scores.extend([0.0, 0.0])

    tokenizer = Tokenizer.from_buffer(tokenizer_json(vocabulary))

    assert tokenizer.token_to_id("[PAD]") is None
    assert tokenizer.token_to_id("a") == vocabulary.tokens.index("a")
