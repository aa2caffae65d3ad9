"""Rebuilds a `tokenizers` JSON file, templates and special tokens from GGUF metadata, so that routers see one format only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import TokenType

from kvferry_engine.errors import UnsupportedModelError, WeightsInvalidError
from kvferry_engine.loader.gguf_file import GgufFile
from kvferry_engine.loader.pre_tokenizers import PRE_TOKENIZERS

SPACE = "▁"
"""What SentencePiece vocabularies write for a space."""
END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
)
"""Control tokens that end an answer whatever the file's eos is, as in llama.cpp; GGUF files carry no list of stop ids."""
SPM_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokenizer's metadata. `types` has one `TokenType` per token; ids are None where the file names none."""

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool
    turn_end_ids: list[int]
    """Further ids that end an answer."""
    templates: dict[str, str] = field(default_factory=dict)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the special tokens, for templates."""
        ids = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_id,
            "pad_token": self.padding_id,
            "unk_token": self.unknown_id,
        }
        return {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Return a file's vocabulary. Raises UnsupportedModelError for unknown kinds, WeightsInvalidError for damage."""
    metadata, path = file.metadata, file.path
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"{path}: tokenizer kind {kind} is not supported; supported: gpt2, llama")
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{path}: pre-tokenizer {pre} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise WeightsInvalidError(f"{path} has no vocabulary (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type") or [int(TokenType.NORMAL)] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(types) != len(tokens) or (scores and len(scores) != len(tokens)):
        raise WeightsInvalidError(
            f"{path} is damaged: {len(tokens)} tokens, {len(types)} token types, {len(scores)} scores"
        )
    is_spm = kind == "llama"
    ids = {
        name: _special_id(metadata, name, len(tokens), SPM_DEFAULTS.get(name) if is_spm else None)
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
    }
    listed = [token_id for token_id in (ids["eot"], ids["eom"]) if token_id is not None]
    known = [i for i, token in enumerate(tokens) if token in END_OF_TURN and types[i] == TokenType.CONTROL]
    adds_bos = is_spm or PRE_TOKENIZERS[pre].adds_bos
    return GgufVocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=_merges(path, metadata.get("tokenizer.ggml.merges") or []),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
        padding_id=ids["padding"],
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and ids["bos"] is not None,
        adds_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and ids["eos"] is not None,
        adds_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        turn_end_ids=[i for i in dict.fromkeys([*listed, *known]) if i != ids["eos"]],
        templates=_templates(metadata),
    )


def tokenizer_json(vocabulary: GgufVocabulary) -> bytes:
    """Return a `tokenizers` JSON file. Raises UnsupportedModelError for a vocabulary without merges and scores."""
    build = _sentencepiece if vocabulary.kind == "llama" else _byte_level
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        **build(vocabulary),
    }
    return json.dumps(spec, ensure_ascii=False).encode("utf-8", errors="surrogatepass")


def _byte_level(vocabulary: GgufVocabulary) -> dict[str, Any]:
    pre = PRE_TOKENIZERS[vocabulary.pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    template = _template(vocabulary)
    return {
        "normalizer": {"type": "NFC"} if pre.is_composed else None,
        "pre_tokenizer": pre.spec(),
        "post_processor": {"type": "Sequence", "processors": [byte_level, template]} if template else byte_level,
        "decoder": byte_level,
        "model": _bpe(vocabulary, vocabulary.merges, ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(vocabulary: GgufVocabulary) -> dict[str, Any]:
    has_prefix = vocabulary.adds_space_prefix
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    merges = vocabulary.merges or merges_from_scores(vocabulary)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if has_prefix else []), to_marks],
        },
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, unknown=unknown, byte_fallback=True),
    }


def merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return merges that build the pieces of a SentencePiece vocabulary in the order of their scores, best first.

    Every way to split a piece into two others is a merge of the piece's rank. Raises UnsupportedModelError without scores.
    """
    if not vocabulary.scores:
        raise UnsupportedModelError("the GGUF vocabulary has neither merges nor scores, so text cannot be tokenized")
    ids = _vocab(vocabulary)
    mergeable = {
        piece: i for piece, i in ids.items() if vocabulary.types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token_id in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-vocabulary.scores[token_id], ids[left], ids[right], (left, right)))
    ranked.sort()
    return [merge for *_, merge in ranked]


def _bpe(
    vocabulary: GgufVocabulary,
    merges: list[tuple[str, str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": _vocab(vocabulary),
        "merges": merges,
    }


def _vocab(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Return piece to id; unused entries only fill the embedding up and are left out, of doubles the first one counts."""
    vocab: dict[str, int] = {}
    for token_id, (piece, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind != TokenType.UNUSED:
            vocab.setdefault(piece, token_id)
    return vocab


def _added_tokens(vocabulary: GgufVocabulary) -> list[dict[str, Any]]:
    vocab = _vocab(vocabulary)
    special_ids = {vocabulary.bos_id, vocabulary.eos_id}
    added = []
    for piece, token_id in vocab.items():
        kind = vocabulary.types[token_id]
        is_special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in special_ids
        if is_special or kind == TokenType.USER_DEFINED:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": token_id, "content": piece, **flags, "special": is_special})
    return added


def _template(vocabulary: GgufVocabulary) -> dict[str, Any] | None:
    """Return the post-processor that puts BOS and EOS around a text, None when neither is wanted."""
    bos = vocabulary.bos_id if vocabulary.adds_bos else None
    eos = vocabulary.eos_id if vocabulary.adds_eos else None
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(token_id: int | None) -> list[dict[str, Any]]:
            return (
                [] if token_id is None else [{"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": type_id}}]
            )

        return [*special(bos), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(eos)]

    pieces = {vocabulary.tokens[i]: i for i in (bos, eos) if i is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in pieces.items()},
    }


def _merges(path: Path, merges: list[str]) -> list[tuple[str, str]]:
    """Split merges at the first space behind their first character."""
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise WeightsInvalidError(f"{path} is damaged: {merge!r} in tokenizer.ggml.merges is not a pair")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _special_id(metadata: dict[str, Any], name: str, num_tokens: int, default: int | None) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return token_id if isinstance(token_id, int) and 0 <= token_id < num_tokens else None


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    templates = {}
    default = metadata.get("tokenizer.chat_template")
    if isinstance(default, str):
        templates["default"] = default
    for name in metadata.get("tokenizer.chat_templates") or []:
        text = metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(text, str):
            templates[str(name)] = text
    return templates
