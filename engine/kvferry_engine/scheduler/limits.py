"""What a sequence needs at least and gets at most, given the model's length and the size of the whole KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry_engine.errors import RequestError
from kvferry_engine.request import Purpose, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`max_model_len` prompt + output tokens; `capacity_tokens` KV slots of all blocks together."""

    max_model_len: int
    capacity_tokens: int

    def length(self, sequence: Sequence) -> int:
        """Return the total length (prompt + output) at which the sequence ends with reason length.

        The last token needs no KV of its own, so one more than the capacity fits when nobody else is there.
        """
        wanted = sequence.num_prompt + sequence.sampling.max_tokens
        return min(wanted, self.max_model_len, self.capacity_tokens + 1, len(sequence.tokens))

    def kv_tokens_to_start(self, sequence: Sequence) -> int:
        """Return the KV slots admission reserves: all known tokens and the next one (which has none at the limit)."""
        if sequence.purpose is Purpose.PREFILL:
            return sequence.upto
        return min(sequence.num_tokens + 1, self.length(sequence) - 1)

    def check(self, sequence: Sequence) -> None:
        """Raises RequestError for a sequence that can never run, whatever else happens."""
        is_prefill = sequence.purpose is Purpose.PREFILL
        if sequence.num_prompt < 1:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        if is_prefill and not 0 < sequence.upto <= sequence.num_prompt:
            raise RequestError(f"cannot prefill {sequence.upto} of {sequence.num_prompt} prompt tokens", param="prompt")
        num_kv = sequence.upto if is_prefill else sequence.num_prompt
        if num_kv + (0 if is_prefill else 1) > self.max_model_len:
            raise RequestError(
                f"the prompt has {sequence.num_prompt} tokens, this engine takes {self.max_model_len} of prompt and "
                "output together; shorten the prompt",
                param="prompt",
            )
        if num_kv > self.capacity_tokens:
            raise RequestError(
                f"the prompt has {sequence.num_prompt} tokens, the whole KV cache of this engine holds "
                f"{self.capacity_tokens}; shorten the prompt or give the engine more cache memory",
                param="prompt",
            )
