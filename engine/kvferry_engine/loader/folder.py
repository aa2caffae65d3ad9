"""A model in a Hugging Face folder: config.json, tokenizer.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import WeightsInvalidError, WeightsNotFoundError
from kvferry_engine.loader.assets import folder_assets, read_generation_config, read_json
from kvferry_engine.loader.hf_config import model_config
from kvferry_engine.loader.identity import weights_id
from kvferry_engine.loader.progress import Progress
from kvferry_engine.loader.safetensors_files import SafetensorsFile, first_dtype, open_safetensors
from kvferry_engine.wire.assets import AssetBundle

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class FolderSource:
    """See `source.ModelSource`. `root` is the model as a person named it."""

    def __init__(self, folder: Path, *, root: str, needs_weights: bool = True) -> None:
        """Read the config and, with `needs_weights`, the headers of all shards.

        Raises WeightsNotFoundError, WeightsInvalidError and UnsupportedModelError.
        """
        self.root = root
        self._folder = folder
        raw = read_json(folder / "config.json")
        if not raw:
            raise WeightsNotFoundError(
                f"{folder} has no config.json; a model folder has config.json, tokenizer.json and *.safetensors"
            )
        dtype = first_dtype(self._files) if needs_weights else "float32"
        generation = read_json(folder / "generation_config.json")
        self.config: ModelConfig = model_config(raw, generation, checkpoint_dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size for file in self._files for _, size in file.tensors.values())

    def assets(self, *, chat_template: str | None = None, generation_config: str = "auto") -> AssetBundle:
        """See `source.ModelSource.assets`."""
        generation = read_generation_config(generation_config, self._folder)
        return folder_assets(self._folder, self.config, generation, chat_template)

    def weights(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `source.ModelSource.weights`."""
        for file in self._files:
            for name, tensor in file.read():
                yield name, tensor
                if progress is not None:
                    progress(file.tensors[name][1])

    def weights_id(self) -> str:
        """See `source.ModelSource.weights_id`."""
        return weights_id(self.config.hf, [file.shard for file in self._files])

    @cached_property
    def _files(self) -> list[SafetensorsFile]:
        weight_map = read_json(self._folder / INDEX).get("weight_map")
        if weight_map is None:
            return [open_safetensors(path) for path in self._unindexed()]
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise WeightsInvalidError(f"weight_map in {self._folder / INDEX} must map tensor names to file names")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (self._folder / name).is_file()]
        if missing:
            raise WeightsNotFoundError(
                f"{self._folder} lacks {', '.join(missing)}, which {INDEX} names; download the model again"
            )
        files = [open_safetensors(self._folder / name) for name in names]
        for file in files:
            lost = [name for name, at in weight_map.items() if at == file.shard.path.name and name not in file.tensors]
            if lost:
                raise WeightsInvalidError(f"{file.shard.path} lacks the tensor {lost[0]}, which {INDEX} promises")
        return files

    def _unindexed(self) -> list[Path]:
        """Return the shards of a folder without index; the original Mistral files are a second copy and left out."""
        single = self._folder / SINGLE
        if single.is_file():
            return [single]
        paths = sorted(path for path in self._folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
        if not paths:
            pickled = any(next(self._folder.glob(pattern), None) for pattern in PICKLED)
            hint = "; its pickled weights are never loaded, convert them to safetensors" if pickled else ""
            raise WeightsNotFoundError(f"{self._folder} has no {SINGLE}, no {INDEX} and no other *.safetensors{hint}")
        return paths
