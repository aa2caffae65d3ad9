"""Tiny checkpoints in both formats, written as the usual tools write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvferry_engine.loader.dummy import tensor_shapes
from kvferry_engine.loader.hf_config import model_config

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def tiny_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random fp32 tensors of a config, by Hugging Face name."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(model_config(config)).items()
    }


def tiny_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with 61 letters and three special tokens (ids 0 to 2)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:61]
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[module]}.{kind}"


def interleave(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows: the i-th and the (i + dim / 2)-th row of a head become neighbours."""
    rows = []
    for head in tensor.chunk(num_heads):
        first, second = head.chunk(2)
        for a, b in zip(first, second, strict=True):
            rows += [a, b]
    return torch.stack(rows)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter would; matrices get the given type, vectors stay F32."""
    architecture = config["model_type"]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: config["vocab_size"] - 3]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * len(letters))
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    if metadata is not None:
        metadata(writer)
    for name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        array = tensor.numpy().astype(np.float32)
        if array.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
