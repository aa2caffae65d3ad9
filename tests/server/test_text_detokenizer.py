"""Incremental detokenizing: equal to decoding everything, never half a character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry_engine.wire.assets import AssetBundle
from kvferry_server.text.detokenizer import Detokenizer
from kvferry_server.text.tokenizer import ModelTokenizer
from server.kit_gateway import ids_of, make_bundle, tiny_tokenizer, token_id


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(make_bundle())


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_text(text: str) -> None:
    tokenizer = ModelTokenizer(make_bundle())

    pieces = pieces_of(tokenizer.detokenizer([], skip_special_tokens=True), ids_of(text))

    assert "".join(pieces) == text


@given(ids=st.lists(st.integers(0, 402), max_size=30), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_give_what_the_tokenizer_decodes(ids: list[int], skip: bool) -> None:
    tokenizer = ModelTokenizer(make_bundle())

    pieces = pieces_of(tokenizer.detokenizer([], skip_special_tokens=skip), ids)

    assert "".join(pieces) == tiny_tokenizer().decode(ids, skip_special_tokens=skip)


def test_half_a_character_is_held_until_it_is_whole(tokenizer: ModelTokenizer) -> None:
    ids = ids_of("🦆")
    assert len(ids) > 1

    pieces = pieces_of(tokenizer.detokenizer([], skip_special_tokens=True), ids)

    assert pieces == [*[""] * (len(ids) - 1), "🦆", ""]


def test_half_a_character_at_the_end_becomes_a_replacement(tokenizer: ModelTokenizer) -> None:
    pieces = pieces_of(tokenizer.detokenizer([], skip_special_tokens=True), ids_of("🦆")[:2])

    assert pieces == ["", "", "\ufffd"]


def test_special_tokens_are_shown_when_asked_for(tokenizer: ModelTokenizer) -> None:
    ids = [*ids_of("a"), token_id("<|im_end|>")]

    hidden = pieces_of(tokenizer.detokenizer([], skip_special_tokens=True), ids)
    shown = pieces_of(tokenizer.detokenizer([], skip_special_tokens=False), ids)

    assert "".join(hidden) == "a"
    assert "".join(shown) == "a<|im_end|>"


def test_bytes_of_tokens_are_exact_also_within_characters(tokenizer: ModelTokenizer) -> None:
    for text in ("🦆", "naïve", " x"):
        assert b"".join(tokenizer.token_bytes(i) for i in ids_of(text)) == text.encode()


def test_ids_outside_the_vocabulary_are_nothing(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.decode([*ids_of("a"), 10**6, 2**40], skip_special_tokens=False) == "a"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(2**40) == b""
    assert tokenizer.tokens([2**40]) == [""]


def byte_fallback_bundle() -> AssetBundle:
    vocabulary = {
        "<unk>": 0,
        **{f"<0x{n:02X}>": n + 1 for n in range(256)},
        "▁": 257,
        "▁Hello": 258,
        "▁world": 259,
        "!": 260,
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return make_bundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens={})


def test_byte_fallback_vocabularies_keep_the_space_after_the_prompt() -> None:
    tokenizer = ModelTokenizer(byte_fallback_bundle())
    duck = [byte + 1 for byte in "🦆".encode()]

    pieces = pieces_of(tokenizer.detokenizer([258], skip_special_tokens=True), [259, 260, *duck])

    assert pieces == [" world", "!", "", "", "", "🦆", ""]
    assert tokenizer.token_bytes(duck[0]) == b"\xf0"


def word_piece_bundle() -> AssetBundle:
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2, "##ly": 3, "[SEP]": 4, "!": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return make_bundle(tokenizer_json=tokenizer.to_str().encode(), special_tokens={})


def test_vocabularies_without_byte_form_go_through_their_own_decoder() -> None:
    tokenizer = ModelTokenizer(word_piece_bundle())

    pieces = pieces_of(tokenizer.detokenizer([1], skip_special_tokens=True), [2, 3, 4, 1, 5])

    assert "".join(pieces) == " worldly hello!"
    assert pieces[0] == " world"


def test_a_long_stream_does_not_slow_the_window_down() -> None:
    tokenizer = ModelTokenizer(word_piece_bundle())
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)

    pieces = [detokenizer.push(1 + n % 2) for n in range(500)]

    assert "".join(pieces) == " ".join(["hello world"] * 250)


def test_bos_is_added_only_where_the_tokenizer_does_not_do_it_itself() -> None:
    with_flag = ModelTokenizer(make_bundle(add_bos_token=True))
    without = ModelTokenizer(make_bundle())
    bos = token_id("<|endoftext|>")

    assert with_flag.encode("a", add_special_tokens=True) == [bos, *ids_of("a")]
    assert with_flag.encode("a", add_special_tokens=False) == ids_of("a")
    assert without.encode("a", add_special_tokens=True) == ids_of("a")


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    spec = json.loads(tiny_tokenizer().to_str())
    spec["truncation"] = {"direction": "Left", "max_length": 2, "strategy": "LongestFirst", "stride": 0}

    tokenizer = ModelTokenizer(make_bundle(tokenizer_json=json.dumps(spec).encode()))

    assert tokenizer.truncation_side == "left"
    assert len(tokenizer.encode("a b c d e", add_special_tokens=True)) > 2
