"""Chooses the next token of every row of a step: constraints and penalties first, then the most likely or a drawn token.

Order (reference http-generation 14.4): grammar masks are in the logits already; raw figures are taken; allowed ids, logit
bias, min_tokens, penalties, bad words; then temperature, min-p, top-k, top-p and a Gumbel draw whose randomness depends on
seed and position alone (`wire.rng`), or argmax. Shape suffixes: n rows, m rows that use a feature, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry_engine.config import LogprobsMode
from kvferry_engine.request import Sequence
from kvferry_engine.sampling.history import LastSampled, TokenCounts
from kvferry_engine.sampling.logprobs import token_logprobs
from kvferry_engine.sampling.parameters import ANY_ID, BadWords, MinTokens, Penalties, RowParameters, make_parameters
from kvferry_engine.wire.messages import TokenLogprobs
from kvferry_kernels.sampler import apply_penalties, greedy, gumbel_argmax, top_k_top_p_min_p

RAW_MODES = (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS)
MINUS_INF = float("-inf")


class Sampler:
    """Samples for one engine. Keeps per sequence what penalties need; `forget` when sequences end. Not thread-safe."""

    def __init__(self, vocab_size: int, logprobs_mode: LogprobsMode, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._mode = logprobs_mode
        self._device = device
        self._counts = TokenCounts(vocab_size, device)
        self._last = LastSampled(device)
        self._parameters: RowParameters | None = None

    @torch.inference_mode()
    def sample(
        self, logits_nV: Tensor, sequences: list[Sequence], positions: list[int] | None = None
    ) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        """Return ids int64 [n] on the logits' device, and figures by row for rows that ask for log-probs.

        logits fp32 [n, V], changed in place. `positions[i]` is the index of the token to sample in prompt + output; default:
        behind the known tokens and placeholders of the sequence. Waits for the device only when log-probs are asked for.
        """
        if positions is None:
            positions = [sequence.num_tokens + sequence.num_placeholders for sequence in sequences]
        logits_nV = logits_nV.contiguous()
        rows = self._parameters_of(sequences)
        is_raw = self._mode in RAW_MODES
        reported_mV = self._rows(logits_nV, rows.logprob_rows) if rows.logprob_rows and is_raw else None
        slots_m = self._constrain(logits_nV, rows, positions) if rows.changes_logits else None
        ids_n = self._choose(logits_nV, rows, positions)
        if slots_m is not None and rows.penalties is not None:
            self._counts.add([sequences[row] for row in rows.penalties.rows], slots_m, ids_n[rows.penalties.rows_m])
        if rows.bad_words is not None:
            self._last.remember(sequences, positions, ids_n)
        if not rows.logprob_rows:
            return ids_n, {}
        if reported_mV is None:
            reported_mV = self._rows(logits_nV, rows.logprob_rows)
        return ids_n, self._report(reported_mV, ids_n, rows)

    def forget(self, handles: list[int]) -> None:
        """Drop what is kept for sequences that ended; unknown handles are ignored."""
        self._counts.forget(handles)
        self._parameters = None

    # --- the steps, in order ----------------------------------------------------------------------------------------

    def _constrain(self, logits_nV: Tensor, rows: RowParameters, positions: list[int]) -> Tensor | None:
        """Apply everything between the raw figures and the temperature; return the slots of penalised rows."""
        if rows.allowed is not None:
            kept_mV = logits_nV[rows.allowed.rows_m].masked_fill_(~rows.allowed.keep_mV, MINUS_INF)
            logits_nV[rows.allowed.rows_m] = kept_mV
        if rows.bias is not None:
            bias = rows.bias
            logits_nV.index_put_((bias.rows_e, bias.ids_e), bias.values_e, accumulate=True)
        if rows.min_tokens is not None:
            self._mask_ends(logits_nV, rows.min_tokens, positions)
        slots_m = None
        if rows.penalties is not None:
            slots_m = self._penalise(logits_nV, rows.penalties, rows.sequences, positions)
        if rows.bad_words is not None:
            self._ban_words(logits_nV, rows.bad_words, rows.sequences, positions)
        return slots_m

    def _mask_ends(self, logits_nV: Tensor, ends: MinTokens, positions: list[int]) -> None:
        if not any(positions[row] < until for row, until in ends.until_by_row.items()):
            return
        is_early_e = self._upload(positions)[ends.rows_e] < ends.until_e
        masks_e = torch.zeros_like(ends.until_e, dtype=torch.float32).masked_fill_(is_early_e, MINUS_INF)
        logits_nV.index_put_((ends.rows_e, ends.ids_e), masks_e, accumulate=True)

    def _penalise(
        self, logits_nV: Tensor, penalties: Penalties, sequences: list[Sequence], positions: list[int]
    ) -> Tensor:
        chosen = [sequences[row] for row in penalties.rows]
        slots_m, prompt_mV, output_mV = self._counts.rows(chosen, [positions[row] for row in penalties.rows])
        logits_mV = logits_nV[penalties.rows_m]
        apply_penalties(
            logits_mV, prompt_mV, output_mV, penalties.presence_m, penalties.frequency_m, penalties.repetition_m
        )
        logits_nV[penalties.rows_m] = logits_mV
        return slots_m

    def _ban_words(self, logits_nV: Tensor, words: BadWords, sequences: list[Sequence], positions: list[int]) -> None:
        masks_w = torch.zeros_like(words.last_w, dtype=torch.float32)
        length = words.prefix_wl.shape[1]
        if length:
            chosen = [sequences[row] for row in words.rows]
            tails = self._last.tails(chosen, [positions[row] for row in words.rows], length)
            follows_w = ((tails[words.indices_w] == words.prefix_wl) | (words.prefix_wl == ANY_ID)).all(-1)
            masks_w.masked_fill_(follows_w, MINUS_INF)
        else:
            masks_w.fill_(MINUS_INF)
        logits_nV.index_put_((words.rows_w, words.last_w), masks_w, accumulate=True)

    def _choose(self, logits_nV: Tensor, rows: RowParameters, positions: list[int]) -> Tensor:
        """Return the chosen ids; the logits of rows that draw become the processed ones."""
        if not rows.num_random:
            return greedy(logits_nV)
        positions_n = self._upload(positions)
        if rows.random_rows_m is None:
            return self._draw(logits_nV, rows, positions_n)
        ids_n = greedy(logits_nV)
        logits_mV = logits_nV[rows.random_rows_m]
        ids_n[rows.random_rows_m] = self._draw(logits_mV, rows, positions_n[rows.random_rows_m])
        if rows.logprob_rows and self._mode not in RAW_MODES:
            logits_nV[rows.random_rows_m] = logits_mV
        return ids_n

    def _draw(self, logits_mV: Tensor, rows: RowParameters, positions_m: Tensor) -> Tensor:
        logits_mV /= rows.temperatures_m[:, None]
        truncation = rows.truncation
        if truncation is not None:
            limits = (truncation.top_k_m, truncation.top_p_m, truncation.min_p_m)
            if truncation.rows_m is None:
                top_k_top_p_min_p(logits_mV, *limits)
            else:
                part = logits_mV[truncation.rows_m]
                top_k_top_p_min_p(part, *limits)
                logits_mV[truncation.rows_m] = part
        return gumbel_argmax(logits_mV, rows.seeds_m, positions_m)

    def _report(self, logits_mV: Tensor, ids_n: Tensor, rows: RowParameters) -> dict[int, TokenLogprobs]:
        samplings = [rows.sequences[row].sampling for row in rows.logprob_rows]
        figures = token_logprobs(
            logits_mV,
            ids_n[self._upload(rows.logprob_rows)],
            [sampling.logprobs or 0 for sampling in samplings],
            mode=self._mode,
            further_ids=[sampling.logprob_token_ids or () for sampling in samplings],
        )
        return dict(zip(rows.logprob_rows, figures, strict=True))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _parameters_of(self, sequences: list[Sequence]) -> RowParameters:
        rows = self._parameters
        if rows is None or not rows.are_for(sequences):
            rows = make_parameters(sequences, vocab_size=self._vocab_size, device=self._device)
            self._parameters = rows
        return rows

    def _rows(self, logits_nV: Tensor, rows: list[int]) -> Tensor:
        """Return a copy of some rows."""
        return logits_nV[self._upload(rows)]

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)
