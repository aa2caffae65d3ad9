"""Every setting of a router, declared once; flags, help texts and documentation derive from the fields.

`RouterSettings` holds the values of one process and never changes. `from_environment` adds the few values that may come
from environment variables: secrets, never behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class SettingsError(Exception):
    """A setting is wrong; the message says what was given, what is allowed and what to do."""


class RoutingPolicy(StrEnum):
    KV_AWARE = "kv_aware"
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"
    SESSION = "session"


class Disaggregation(StrEnum):
    AUTO = "auto"
    """Ferry a prompt when that is estimated to be faster."""
    ALWAYS = "always"
    NEVER = "never"


class OnPrefillUnavailable(StrEnum):
    DECODE_LOCALLY = "decode_locally"
    REJECT = "reject"


class ContentFormat(StrEnum):
    AUTO = "auto"
    STRING = "string"
    OPENAI = "openai"


class FingerprintMode(StrEnum):
    FULL = "full"
    HASH = "hash"
    CUSTOM = "custom"
    NONE = "none"


class GenerationConfig(StrEnum):
    AUTO = "auto"
    """Sampling defaults of the model's generation_config.json."""
    VLLM = "vllm"
    """Neutral values only."""


def setting(help: str, *, flag: str | None = None, alias: tuple[str, ...] = (), unit: str = "", **kwargs: Any) -> Any:
    """Declare one setting: its sentence, its flag when it differs from the field name, further spellings, its unit."""
    return field(metadata={"help": help, "flag": flag, "alias": alias, "unit": unit}, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """Settings of one router process."""

    # The process: where it listens and how it ends.
    host: str = setting("Address the HTTP API binds.", default="0.0.0.0")
    port: int = setting("Port of the HTTP API.", default=8000)
    uds: str | None = setting("Unix socket to serve on instead of host and port.", default=None)
    metrics_port: int = setting("Port of /state, /ready and /metrics; 0: none.", default=8001)
    root_path: str = setting("Path prefix that a proxy in front strips.", default="")
    ssl_keyfile: str | None = setting("TLS private key (PEM).", default=None)
    ssl_certfile: str | None = setting("TLS certificate chain (PEM).", default=None)
    ssl_ca_certs: str | None = setting("Authorities that client certificates must come from.", default=None)
    timeout_keep_alive: int = setting("Longest idle time of a connection.", unit="s", default=5)
    shutdown_timeout: float = setting("Longest time SIGTERM waits for running requests.", unit="s", default=120.0)
    shutdown_delay: float = setting(
        "Time after SIGTERM in which connections are still accepted, until load balancers have noticed.",
        unit="s",
        default=10.0,
    )
    log_level: str = setting("debug, info, warning or error.", default="info")

    # Routing and engines (read by routing/, engines/ and main).
    decode: str = setting("Where decode engines are: static:HOST:PORT,... or dns:NAME:PORT.", default="")
    prefill: str = setting("Where prefill engines are, same forms; empty: none.", default="")
    name: str = setting("Name of this router, shown to engines; default: the host name.", default="")
    service: str = setting("namespace/name/uid of the LLMService this router belongs to.", default="")
    wire_secret_file: str | None = setting(
        "File with the wire secret (and, on a second line, the previous one during rotation).", default=None
    )
    policy: RoutingPolicy = setting("How engines are chosen.", default=RoutingPolicy.KV_AWARE)
    disaggregation: Disaggregation = setting(
        "When prompts are computed on prefill engines.", default=Disaggregation.AUTO
    )
    on_prefill_unavailable: OnPrefillUnavailable = setting(
        "What happens to prompts for prefill engines while there is none.", default=OnPrefillUnavailable.DECODE_LOCALLY
    )
    max_queued_requests: int = setting(
        "Most requests waiting at the engines before new ones are answered 429; 0: no limit.",
        alias=("--max-num-queued-reqs",),
        default=512,
    )
    max_queued_tokens: int = setting(
        "Most prompt tokens waiting at the engines before new requests are answered 429; 0: no limit.",
        alias=("--max-num-queued-tokens",),
        unit="tokens",
        default=0,
    )
    submit_timeout: float = setting("Longest time to find an engine that accepts a request.", unit="s", default=30.0)
    resume_wait: float = setting(
        "Longest time a running request waits for another engine when its own is gone.", unit="s", default=60.0
    )
    request_timeout: float = setting("Longest life of a request; 0: no limit.", unit="s", default=0.0)

    # Who may call, and how much they may send.
    api_key: tuple[str, ...] = setting("Keys of which a client must send one as bearer token.", default=())
    api_key_file: str | None = setting("File with one key a line; read again when it changes.", default=None)
    allowed_origins: tuple[str, ...] = setting("Origins for cross-origin requests (JSON list).", default=())
    allowed_methods: tuple[str, ...] = setting("Methods for cross-origin requests (JSON list).", default=("*",))
    allowed_headers: tuple[str, ...] = setting("Headers for cross-origin requests (JSON list).", default=("*",))
    allow_credentials: bool = setting("Allow cookies in cross-origin requests.", default=False)
    max_body_bytes: int = setting("Largest request body.", unit="bytes", default=32 << 20)
    max_json_depth: int = setting("Deepest nesting of objects and arrays in a body.", default=128)
    max_n: int = setting("Largest n of a request.", default=16384)
    max_completion_prompts: int = setting("Most prompts in one completion request.", default=1024)
    max_stop_strings: int = setting("Most stop strings of a request.", default=4)
    max_bad_words: int = setting("Most banned token sequences of a request.", default=128)
    max_bad_words_tokens: int = setting(
        "Most tokens in all banned sequences of a request.", unit="tokens", default=1024
    )
    skip_model_name_validation: bool = setting("Accept any `model` in requests.", default=False)
    disable_fastapi_docs: bool = setting("Do not serve /docs, /redoc and /openapi.json.", default=False)

    # What answers look like.
    response_role: str = setting("Role of generated messages.", default="assistant")
    return_tokens_as_token_ids: bool = setting("Show tokens of log-probs as token_id:N.", default=False)
    enable_prompt_tokens_details: bool = setting("Report cached tokens in usage.", default=False)
    enable_force_include_usage: bool = setting("Report usage in every stream, as if asked for.", default=False)
    fingerprint_mode: FingerprintMode = setting("Form of system_fingerprint.", default=FingerprintMode.FULL)
    fingerprint_value: str = setting("Value of system_fingerprint in mode custom.", default="")
    stream_interval: int = setting(
        "Fewest tokens of one chunk of a stream, first and last excepted.", unit="tokens", default=1
    )
    sse_keep_alive_interval: float = setting(
        "Idle time after which a stream sends a comment; 0: never.", unit="s", default=0.0
    )
    disable_access_log: bool = setting(
        "Write no line per HTTP request.", alias=("--disable-uvicorn-access-log",), default=False
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        "Paths without access log lines (comma list).", default=("/health", "/metrics", "/ping")
    )

    # Text: templates, tokenizer, sampling defaults.
    chat_template: str | None = setting(
        "Chat template: a file, a literal template or a name in the model.", default=None
    )
    chat_template_content_format: ContentFormat = setting(
        "How templates get message content: text, parts, or decided from the template.", default=ContentFormat.AUTO
    )
    default_chat_template_kwargs: dict[str, Any] = setting(
        "Template variables under those of a request (JSON).", default_factory=dict
    )
    trust_request_chat_template: bool = setting("Let requests bring their own template.", default=False)
    chat_template_render_timeout: float = setting("Longest rendering of a template.", unit="s", default=30.0)
    tokenizer_threads: int = setting(
        "Threads for templates and tokenizing.", alias=("--renderer-num-workers",), default=4
    )
    generation_config: GenerationConfig = setting("Where sampling defaults come from.", default=GenerationConfig.AUTO)
    override_generation_config: dict[str, Any] = setting(
        "Sampling defaults over the model's (JSON).", default_factory=dict
    )

    def __post_init__(self) -> None:
        """Raise SettingsError for values that can never work."""
        for name, lowest in (
            ("max_body_bytes", 1),
            ("max_json_depth", 4),
            ("max_n", 1),
            ("max_completion_prompts", 1),
            ("max_stop_strings", 0),
            ("stream_interval", 1),
            ("sse_keep_alive_interval", 0),
            ("tokenizer_threads", 1),
            ("max_queued_requests", 0),
            ("max_queued_tokens", 0),
            ("chat_template_render_timeout", 0.001),
        ):
            if getattr(self, name) < lowest:
                raise SettingsError(f"{name} is {getattr(self, name)}, it must be at least {lowest}")
        if self.fingerprint_mode == FingerprintMode.CUSTOM and not self.fingerprint_value:
            raise SettingsError("fingerprint_mode custom needs fingerprint_value")
        if any(not key.strip() for key in self.api_key):
            raise SettingsError("api_key has an empty key; give a non-empty one or leave the setting out")


ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "api_key": ("KVFERRY_API_KEY", "VLLM_API_KEY"),
    "api_key_file": ("KVFERRY_API_KEY_FILE",),
    "wire_secret_file": ("KVFERRY_WIRE_SECRET_FILE",),
    "name": ("KVFERRY_NAME",),
}
"""Settings that may come from environment variables, first name first."""


def from_environment(settings: RouterSettings, environ: Mapping[str, str]) -> RouterSettings:
    """Return `settings` with values of environment variables where a setting still has its default."""
    found: dict[str, Any] = {}
    for name, variables in ENVIRONMENT.items():
        value = next((environ[variable] for variable in variables if environ.get(variable)), None)
        if value is not None and not getattr(settings, name):
            found[name] = (value,) if name == "api_key" else value
    return replace(settings, **found)
