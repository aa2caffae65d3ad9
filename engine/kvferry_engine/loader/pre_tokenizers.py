"""How byte-level vocabularies cut text before merging, by the name that GGUF files record (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json files; llama.cpp (src/llama-vocab.cpp) says which name means which.
A pattern applies to the pieces that the one before it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")


def _alternatives(*patterns: str) -> str:
    return "|".join(patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Patterns in order, and what else the name implies about the vocabulary."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as it stands is not built from merges."""
    adds_bos: bool = False
    is_composed: bool = False
    """Text is brought to Unicode NFC first."""

    def spec(self) -> dict[str, Any]:
        """Return the `pre_tokenizer` of a tokenizers file."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


_DIGITS = PreTokenizer(patterns=(r"\p{N}", GPT2))
_PLAIN = PreTokenizer(patterns=(GPT2,))
_LLAMA3_PATTERN = _alternatives(_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES)
_LLAMA3 = PreTokenizer(patterns=(_LLAMA3_PATTERN,), ignore_merges=True, adds_bos=True)
_QWEN2_PATTERN = _alternatives(_CONTRACTIONS, _WORD, r"\p{N}", _MARKS, _SPACES)
_QWEN2 = PreTokenizer(patterns=(_QWEN2_PATTERN,), is_composed=True)
_GPT4O_PATTERN = _alternatives(
    *(f"{cased}{_CONTRACTIONS}?" for cased in _CASED), r"\p{N}{1,3}", _MARKS_OR_SLASH, _SPACES
)
_TEKKEN_PATTERN = _alternatives(*_CASED, r"\p{N}", _MARKS_OR_SLASH, _SPACES)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "tekken": PreTokenizer(patterns=(_TEKKEN_PATTERN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
PRE_TOKENIZERS |= dict.fromkeys(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
)
PRE_TOKENIZERS |= dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "exaone4"), _PLAIN)
PRE_TOKENIZERS |= dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3)
PRE_TOKENIZERS |= dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(patterns=(_LLAMA3_PATTERN,)))
PRE_TOKENIZERS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2)
PRE_TOKENIZERS |= dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(patterns=(_GPT4O_PATTERN,)))
