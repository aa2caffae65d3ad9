"""GGUF files: structure, values of every quantisation, names and row order, and every kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry_engine.errors import EngineError, UnsupportedModelError, WeightsInvalidError, WeightsNotFoundError
from kvferry_engine.layers.rotary import RopeShape, inverse_frequencies
from kvferry_engine.loader.gguf_file import GgufTensor, open_gguf
from kvferry_engine.loader.gguf_weights import read_tensor, separate_halves
from kvferry_engine.loader.source import open_source
from loader.tiny_checkpoints import TINY, interleave, tiny_tensors, write_gguf

Kind = GGMLQuantizationType
QWEN2 = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = {**TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
BYTE_MEANINGFUL = [kind for kind in GGML_QUANT_SIZES if hasattr(quants, kind.name) and kind is not Kind.BF16]
"""Types that the gguf package can expand."""


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(open_source(str(path)).weights())


@pytest.mark.parametrize("config", [TINY, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_a_file_gives_the_tensors_it_was_made_of(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = tiny_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors)

    weights = weights_of(path)

    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name], tensors[name]) for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TINY, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_transformers_computes_the_same_from_the_files_config_and_weights(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tensors = tiny_tensors(config)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", config, tensors)))
    ids = torch.arange(12)[None]

    logits = []
    for raw, weights in ((config, tensors), (source.config.hf, dict(source.weights()))):
        values = {
            key: value
            for key, value in raw.items()
            if key not in ("architectures", "model_type", "torch_dtype", "dtype")
        }
        name = config["architectures"][0]
        model = getattr(transformers, name)(getattr(transformers, name.replace("ForCausalLM", "Config"))(**values))
        result = model.load_state_dict(weights, strict=False)
        assert not result.unexpected_keys
        assert set(result.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
        with torch.no_grad():
            logits.append(model(ids).logits)

    torch.testing.assert_close(logits[0], logits[1])


def test_the_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    config = open_source(str(write_gguf(tmp_path / "m.gguf", QWEN2, tiny_tensors(QWEN2)))).config

    assert config.architecture == "Qwen2ForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (64, 32, 64)
    assert config.max_position == 128
    assert config.tie_word_embeddings
    assert config.attention_bias and not config.output_bias
    assert config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q8_0, "bfloat16")],
)
def test_the_dtype_is_that_of_most_weights(tmp_path: Path, kind: Kind, dtype: str) -> None:
    assert open_source(str(write_gguf(tmp_path / "m.gguf", TINY, tiny_tensors(TINY), kind=kind))).config.dtype == dtype


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Kind.F16, 0.002),
        (Kind.BF16, 0.02),
        (Kind.Q8_0, 0.03),
        (Kind.Q5_1, 0.15),
        (Kind.Q5_0, 0.25),
        (Kind.Q4_1, 0.3),
        (Kind.Q4_0, 0.5),
    ],
)
def test_quantised_weights_are_near_the_original_ones(tmp_path: Path, kind: Kind, tolerance: float) -> None:
    tensors = tiny_tensors(TINY)

    weights = weights_of(write_gguf(tmp_path / "m.gguf", TINY, tensors, kind=kind))

    for name, tensor in tensors.items():
        assert (weights[name].float() - tensor).abs().max() <= tolerance, name


@pytest.mark.parametrize("kind", BYTE_MEANINGFUL, ids=lambda kind: kind.name)
def test_every_type_the_package_knows_is_expanded_as_it_does(tmp_path: Path, kind: Kind) -> None:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (70, 3 * block_bytes), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()

    file = open_gguf(path)
    with np.errstate(all="ignore"):
        values = read_tensor(file, file.tensors["t"])
        expected = quants.dequantize(raw, kind)

    assert values.shape == (70, 3 * block_elements)
    np.testing.assert_array_equal(values.float().numpy(), expected)


def test_large_tensors_are_expanded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tiny_tensors(TINY)
    path = write_gguf(tmp_path / "m.gguf", TINY, tensors, kind=Kind.Q4_1)
    whole = weights_of(path)
    monkeypatch.setattr("kvferry_engine.loader.gguf_weights.ROWS_BYTES", 100)

    pieces = weights_of(path)

    assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_separating_halves_undoes_interleaving() -> None:
    weight, bias = torch.randn(24, 5), torch.randn(24)

    assert torch.equal(separate_halves(interleave(weight, 3), 3), weight)
    assert torch.equal(separate_halves(interleave(bias, 3), 3), bias)


def test_the_parser_agrees_with_the_packages_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, tiny_tensors(TINY), kind=Kind.Q8_0)
    reader = GGUFReader(path)

    file = open_gguf(path)

    for name, value in file.metadata.items():
        assert reader.fields[name].contents() == value, name
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.start, ours.num_bytes, ours.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert list(ours.shape) == tensor.shape.tolist()[::-1]


def test_llama3_rope_factors_become_frequencies(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    shape = RopeShape(head_dim=8, max_position=128, max_model_len=128)
    expected, _ = inverse_frequencies(rope, shape)
    plain, _ = inverse_frequencies({"rope_theta": 10000.0}, shape)
    factors = (plain / expected).numpy()

    config = open_source(
        str(
            write_gguf(
                tmp_path / "m.gguf",
                TINY,
                tiny_tensors(TINY),
                metadata=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
            )
        )
    ).config
    actual, attention_factor = inverse_frequencies(config.rope, shape)

    torch.testing.assert_close(actual, expected)
    assert attention_factor == 1.0


def test_yarn_and_linear_scaling_are_translated(tmp_path: Path) -> None:
    def yarn(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    def linear(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(2.0)

    def other(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "spiral")

    def rope_of(name: str, metadata: Callable[[GGUFWriter], None]) -> dict[str, Any]:
        path = write_gguf(tmp_path / name, TINY, tiny_tensors(TINY), metadata=metadata)
        return open_source(str(path)).config.rope

    base = {"rope_theta": 10000.0}
    assert rope_of("a.gguf", yarn) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **base,
    }
    assert rope_of("b.gguf", linear) == {"rope_type": "linear", "factor": 2.0, **base}
    with pytest.raises(UnsupportedModelError, match="spiral"):
        rope_of("c.gguf", other)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY)
    names = list(tensors)
    first = {name: tensors[name] for name in names[::2]}
    second = {name: tensors[name] for name in names[1::2]}
    write_gguf(tmp_path / "m-00001-of-00002.gguf", TINY, first)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", TINY, second)

    weights = weights_of(tmp_path)

    assert all(torch.equal(weights[name], tensors[name]) for name in tensors)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(WeightsNotFoundError, match=r"m-00002-of-00002\.gguf"):
        open_source(str(tmp_path / "m-00001-of-00002.gguf"))


def test_other_architectures_and_experts_are_refused(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "a.gguf", {**TINY, "model_type": "gemma3"}, {})
    with pytest.raises(UnsupportedModelError, match="gemma3 is not supported; supported: llama, qwen2, qwen3"):
        open_source(str(other))

    experts = write_gguf(
        tmp_path / "b.gguf", TINY, tiny_tensors(TINY), metadata=lambda writer: writer.add_expert_count(8)
    )
    with pytest.raises(UnsupportedModelError, match="experts"):
        open_source(str(experts))


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        TINY,
        tiny_tensors(TINY),
        metadata=lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros(8, np.float32)),
    )

    with pytest.raises(UnsupportedModelError, match="ffn_gate_inp"):
        weights_of(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"version https://git-lfs.github.com/spec/v1"):
        path.write_bytes(content)
        with pytest.raises(WeightsInvalidError, match="is not a GGUF file"):
            open_source(str(path))
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(16))
    with pytest.raises(WeightsInvalidError, match="little-endian versions 2 and 3"):
        open_source(str(path))


def test_truncation_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", TINY, tiny_tensors(TINY), kind=Kind.Q4_0).read_bytes()
    path = tmp_path / "m.gguf"

    for keep in (*range(4, 600, 7), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(WeightsInvalidError, match=r"cut short|is not a GGUF file") as caught:
            open_gguf(path)
        assert "\n" not in str(caught.value)


HEADER_BYTES = 3000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, HEADER_BYTES), value=st.integers(0, 255))
def test_a_damaged_header_never_ends_in_another_error(tmp_path: Path, position: int, value: int) -> None:
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(original, TINY, tiny_tensors(TINY), kind=Kind.Q4_0)
    data = bytearray(original.read_bytes())
    data[position] = value
    path = tmp_path / "m.gguf"
    path.write_bytes(data)

    try:
        source = open_source(str(path))
        source.assets()
        for _ in source.weights():
            pass
    except EngineError as error:
        assert "\n" not in str(error)


def test_rows_that_do_not_fill_blocks_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 33, int(Kind.Q4_0), 0)
    path.write_bytes(header + tensor + bytes(100))
    with pytest.raises(WeightsInvalidError, match="stores 32 at a time"):
        open_gguf(path)

    unknown = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 999, 0)
    path.write_bytes(header + unknown + bytes(100))
    with pytest.raises(UnsupportedModelError, match="unknown type 999"):
        open_gguf(path)


def test_plain_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    file = open_gguf(write_gguf(tmp_path / "m.gguf", TINY, tiny_tensors(TINY)))
    tensor = file.tensors["token_embd.weight"]
    assert isinstance(tensor, GgufTensor)

    assert read_tensor(file, tensor).data_ptr() == read_tensor(file, tensor).data_ptr()
