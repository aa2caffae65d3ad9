"""A model in a GGUF file, or in several that llama.cpp split it into."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import WeightsInvalidError, WeightsNotFoundError
from kvferry_engine.loader.assets import choose_chat_template, parse_tokenizer, read_generation_config
from kvferry_engine.loader.gguf_config import INTERLEAVED, gguf_model_config
from kvferry_engine.loader.gguf_file import GgufFile, open_gguf
from kvferry_engine.loader.gguf_tokenizer import GgufVocabulary, read_vocabulary, tokenizer_json
from kvferry_engine.loader.gguf_weights import gguf_weights
from kvferry_engine.loader.hf_config import token_ids
from kvferry_engine.loader.identity import Shard, weights_id
from kvferry_engine.loader.progress import Progress
from kvferry_engine.wire.assets import AssetBundle

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")


class GgufSource:
    """See `source.ModelSource`."""

    def __init__(self, path: Path, *, root: str) -> None:
        """Parse headers and vocabulary. Raises WeightsNotFoundError, WeightsInvalidError and UnsupportedModelError."""
        self.root = root
        self._path = path
        self._files = [open_gguf(part) for part in split_parts(path)]
        self._vocabulary: GgufVocabulary = read_vocabulary(self._files[0])
        vocabulary = self._vocabulary
        self._eos_ids = list(token_ids(vocabulary.eos_id, vocabulary.turn_end_ids))
        self.config: ModelConfig = gguf_model_config(self._files, self._eos_ids, vocabulary.bos_id)
        if len(vocabulary.tokens) > self.config.vocab_size:
            raise WeightsInvalidError(
                f"{path} has {len(vocabulary.tokens)} tokens, but embeddings for {self.config.vocab_size} only"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for file in self._files for tensor in file.tensors.values())

    def assets(self, *, chat_template: str | None = None, generation_config: str = "auto") -> AssetBundle:
        """See `source.ModelSource.assets`. A GGUF file has no generation config of its own."""
        generation = read_generation_config(generation_config, None)
        vocabulary = self._vocabulary
        data = tokenizer_json(vocabulary)
        parse_tokenizer(data, self._path)
        ids = token_ids(self._eos_ids, generation.get("eos_token_id"))
        return AssetBundle(
            tokenizer_json=data,
            chat_templates=choose_chat_template(vocabulary.templates, chat_template),
            special_tokens=vocabulary.special_tokens,
            eos_token_id=vocabulary.eos_id,
            extra_eos_token_ids=[i for i in ids if i != vocabulary.eos_id],
            add_bos_token=vocabulary.adds_bos,
            generation_config=generation,
            config=self.config.hf,
            tasks=list(self.config.tasks),
            max_model_len=self.config.max_position,
        )

    def weights(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `source.ModelSource.weights`."""
        interleaved = self._files[0].metadata["general.architecture"] in INTERLEAVED
        return gguf_weights(self._files, self.config, interleaved=interleaved, progress=progress)

    def weights_id(self) -> str:
        """See `source.ModelSource.weights_id`."""
        return weights_id(self.config.hf, [_shard(file) for file in self._files])


def split_parts(path: Path) -> list[Path]:
    """Return all parts of a split model, given any of them. Raises WeightsNotFoundError for missing ones."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    total = int(match["total"])
    parts = [path.with_name(f"{match['stem']}-{number:05d}-of-{total:05d}.gguf") for number in range(1, total + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise WeightsNotFoundError(
            f"{path.parent} lacks {', '.join(missing)}, parts of the model that {path.name} belongs to"
        )
    return parts


def _shard(file: GgufFile) -> Shard:
    return Shard(path=file.path, header_bytes=file.header_bytes)
