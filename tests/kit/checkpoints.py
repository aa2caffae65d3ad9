"""Tiny random checkpoints with everything a real one has: config, safetensors, tokenizer, chat template, generation config.

Made once per test process with transformers (the oracle) and cached by architecture and overrides; a few hundred KB each.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
EOS, BOS, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The ferry carries keys and values from the engine that read the prompt to the engine that writes the answer.",
    "Hello, world! Numbers: 0 1 2 3 4 5 6 7 8 9. Grüße, naïve café, 日本語, emoji 🚢.",
    "def ferry(block):\n    return block.copy()\n",
)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
}
"""Short names with what differs from `SHAPE`."""

_folder: Path | None = None


def make_checkpoint(
    arch: str = "llama", folder: Path | None = None, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Return the folder of a tiny checkpoint of `arch` (a key of ARCHITECTURES), made on first use.

    `overrides` are fields of its transformers config. `folder` is where to make it; default: a folder that is removed at
    exit. Weights are random but large enough that attention, biases and norms all show in the logits.
    """
    values = {**SHAPE, **ARCHITECTURES[arch], **overrides}
    key = json.dumps([arch, seed, dtype, values], sort_keys=True)
    name = f"{arch}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    target = (folder or _session_folder()) / name
    if not (target / "config.json").exists():
        _write(target, arch, values, seed, dtype)
    return target


def reference_model(path: Path, dtype: str = "float32") -> Any:
    """The transformers model of a checkpoint, eager attention, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.eval()


def reference_logits(model: Any, ids: list[int]) -> Any:
    """transformers' fp32 logits [len(ids), vocabulary] of a sequence, in one forward pass."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def reference_choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What transformers picks greedily at each position of `output`, given all tokens before it.

    Equal to `output` exactly when transformers' own greedy continuation of `prompt` is `output`: one forward instead of many.
    """
    logits = reference_logits(model, [*prompt, *output[:-1]])
    choices: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return choices


def reference_greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation by transformers, EOS ignored."""
    ids: list[int] = []
    while len(ids) < max_tokens:
        ids.append(int(reference_logits(model, [*prompt, *ids])[-1].argmax()))
    return ids


def _session_folder() -> Path:
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="kvferry-checkpoints-"))
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


def _write(target: Path, arch: str, values: dict[str, Any], seed: int, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = _tokenizer()
    eos_id, bos_id = tokenizer.convert_tokens_to_ids(EOS), tokenizer.convert_tokens_to_ids(BOS)
    config = AutoConfig.for_model(arch, **values, eos_token_id=eos_id, bos_token_id=bos_id, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.2 * noise)
            else:
                # Layers must outweigh the embedding, or a tied model repeats its last token for ever.
                scale = 4.0 if "o_proj" in name or "down_proj" in name else 1.2
                parameter.copy_(noise * scale * parameter.shape[-1] ** -0.5)
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=eos_id, bos_token_id=bos_id)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=[BOS, START, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=512)
    fast.chat_template = CHAT_TEMPLATE
    return fast
