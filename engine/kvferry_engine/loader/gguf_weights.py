"""Turns GGUF tensors into the tensors of a Hugging Face checkpoint: names, row order of q and k, floating-point values.

llama.cpp stores the q and k projections of the `llama` architecture with the two halves of each head interleaved, because
its rotary embedding rotates neighbours; Hugging Face rotates halves, so the order is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import UnsupportedModelError
from kvferry_engine.loader.gguf_file import GgufFile, GgufTensor
from kvferry_engine.loader.progress import Progress

ROWS_BYTES = 8 << 20
"""Quantised bytes expanded at a time: bounds the temporary arrays of an expansion."""
PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
COMPUTED = {"rope_freqs.weight"}
"""Tensors that became part of the config (`gguf_config`)."""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_weights(
    files: list[GgufFile], config: ModelConfig, *, interleaved: bool, progress: Progress | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor): plain types as they are, quantised ones as fp32.

    `interleaved`: q and k rows are in llama.cpp's rotary order. Raises UnsupportedModelError for tensors the architecture
    does not have and for types that cannot be expanded.
    """
    heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads} if interleaved else {}
    for file in files:
        for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.start):
            if tensor.name not in COMPUTED:
                name = hf_name(tensor.name)
                values = read_tensor(file, tensor)
                num_heads = next((count for part, count in heads.items() if part in name), None)
                yield name, values if num_heads is None else separate_halves(values, num_heads)
            if progress is not None:
                progress(tensor.num_bytes)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor. Raises UnsupportedModelError for unknown ones."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise UnsupportedModelError(f"the GGUF file has a tensor {name}, which no supported architecture uses")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def separate_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of each head's rows: weight [heads * dim, in] or bias [heads * dim]."""
    pairs = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def read_tensor(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """Return a tensor's values; plain types are views of the mapped file."""
    if tensor.kind in PLAIN:
        count = int(np.prod(tensor.shape, dtype=np.int64))
        flat = torch.frombuffer(file.data, dtype=PLAIN[tensor.kind], count=count, offset=tensor.start)
        return flat.view(tensor.shape)
    num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    quantised = np.frombuffer(file.data, np.uint8, tensor.num_bytes, tensor.start).reshape(num_rows, -1)
    values = torch.empty((num_rows, tensor.shape[-1]), dtype=torch.float32)
    step = max(ROWS_BYTES // quantised.shape[1], 1)
    for row in range(0, num_rows, step):
        try:
            expanded = dequantize(quantised[row : row + step], tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{file.path}: tensor {tensor.name} has type {tensor.kind.name}, which cannot be expanded"
            ) from error
        values[row : row + step] = torch.from_numpy(expanded)
    return values.view(tensor.shape)
