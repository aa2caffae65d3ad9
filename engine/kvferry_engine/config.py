"""Every setting of an engine, declared once; flags, help texts and documentation derive from the fields.

`EngineConfig` holds what a person asked for, `None` meaning "decide from the model and the machine"; the loader and `main`
resolve those in one place (`resolve`) and hand frozen values on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry_engine.wire.messages import Role


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class AttentionBackendName(StrEnum):
    AUTO = "auto"
    TRITON = "triton"
    CPU = "cpu"
    TORCH = "torch"


class SchedulingPolicy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class TransportName(StrEnum):
    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


class LogprobsMode(StrEnum):
    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"


def setting(help: str, *, flag: str | None = None, alias: tuple[str, ...] = (), unit: str = "", **kwargs: Any) -> Any:
    """Declare one setting: its sentence, its flag when that differs from the field name, further spellings, its unit."""
    return field(metadata={"help": help, "flag": flag, "alias": alias, "unit": unit}, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of one engine process group."""

    model: str = setting("Model: a folder, a .gguf file, pkg:NAME of an installed model package, or a hub id.", flag="")
    served_model_name: tuple[str, ...] = setting(
        "Names clients may put in `model`; the first one is reported. Default: the model argument.", default=()
    )
    role: Role = setting(
        "What the router prefers this engine for; it can do everything whatever the role.", default=Role.BOTH
    )
    dtype: DType = setting(
        "Type of weights, activations and KV cache; auto: the checkpoint's, bfloat16 for float32 ones on CUDA.",
        default=DType.AUTO,
    )
    device: Device = setting("Where the model runs.", default=Device.AUTO)
    max_model_len: int | None = setting("Longest prompt + output.", unit="tokens", default=None)
    block_size: int = setting("KV slots per block: 16, 32, 64 or 128.", unit="tokens", default=32)
    kv_cache_memory_bytes: int | None = setting(
        "Memory for the KV cache, such as 4G; default: what fits.", unit="bytes", default=None
    )
    gpu_memory_utilization: float = setting("Share of the device's memory to use in all.", default=0.9)
    num_gpu_blocks_override: int | None = setting(
        "Number of KV blocks, whatever the memory (tests, experiments).", default=None
    )
    max_num_seqs: int = setting("Most sequences in one step.", default=256)
    max_num_batched_tokens: int = setting(
        "Token budget of one step, prompts and decodes together.", unit="tokens", default=2048
    )
    max_num_queued_reqs: int = setting("Most waiting sequences before new requests are answered busy.", default=4096)
    scheduling_policy: SchedulingPolicy = setting("Order of waiting requests.", default=SchedulingPolicy.FCFS)
    enable_prefix_caching: bool = setting("Reuse KV blocks of equal prefixes.", default=True)
    tensor_parallel_size: int = setting("Number of ranks the model is split over.", alias=("-tp",), default=1)
    attention_backend: AttentionBackendName = setting("Attention and small kernels.", default=AttentionBackendName.AUTO)
    enforce_eager: bool = setting("Do not capture CUDA graphs.", default=False)
    threads: int | None = setting(
        "CPU threads of one rank; default: the cgroup quota divided by the ranks.", default=None
    )
    max_logprobs: int = setting("Most log-probs a request may ask for; -1: no limit.", default=20)
    logprobs_mode: LogprobsMode = setting("Which numbers log-probs report.", default=LogprobsMode.RAW_LOGPROBS)
    chat_template: str | None = setting("Chat template: a file or a literal template.", default=None)
    generation_config: str = setting("auto (next to the model), a folder, or vllm (none).", default="auto")
    revision: str | None = setting("Revision of a hub model.", default=None)
    seed: int = setting("Seed of dummy weights.", default=0)
    load_format: str = setting("auto, safetensors, gguf or dummy (random weights from the config).", default="auto")
    host: str = setting(
        "Address to bind; without a wire secret only loopback is allowed for the wire.", default="127.0.0.1"
    )
    advertise_host: str | None = setting("Address other engines reach this one at; default: --host.", default=None)
    port: int = setting("ZeroMQ port for routers and peer engines.", default=7070)
    store_port: int = setting("TCPStore port for pair groups.", default=7080)
    http_port: int = setting("HTTP port for /health, /ready and /metrics.", default=8001)
    wire_secret_file: str | None = setting(
        "File with the wire secret (and, on a second line, the previous one during rotation).", default=None
    )
    service: str = setting("namespace/name/uid of the LLMService this engine belongs to.", default="")
    transfer_transport: TransportName = setting("How KV travels between engines.", default=TransportName.AUTO)
    staging_slots: int = setting("Receive slots for ferried KV, one pool for all peers.", default=8)
    staging_slot_bytes: int = setting("Size of one staging slot.", unit="bytes", default=4 << 20)
    drain_seconds: float = setting("Longest time SIGTERM waits for running requests.", unit="s", default=120.0)
    log_level: str = setting("debug, info, warning or error.", default="info")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What the loader found out about a model: everything layers and runner need, nothing of the file format.

    `architecture` is the Hugging Face class name (`LlamaForCausalLM`, ...); `rope` the Hugging Face rope parameters
    (`rope_type`, `rope_theta`, `factor`, ...). `sliding_window` 0 = none; `layer_types` names per layer
    `full_attention` or `sliding_attention`. `hf` keeps the raw config for what is model-specific.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: dict[str, Any]
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Bias on q, k, v."""
    output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    attention_soft_cap: float = 0.0
    hidden_activation: str = "silu"
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tasks: tuple[str, ...] = ("generate",)
    hf: dict[str, Any] = field(default_factory=dict)
