from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry_kernels.dispatch import Backend
from kvferry_kernels.testing import BLOCK_SIZES, DTYPES, HEAD_COUNTS, HEAD_DIMS, PagedCase, assert_close
from kvferry_kernels.varlen_attention import prefill_attention
from kvferry_kernels.varlen_attention.cpu import QUERY_CHUNK


def attend(case: PagedCase, backend: Backend, device: str = "cpu", **options: Any) -> Tensor:
    if options.pop("with_sinks", False):
        options["sinks"] = case.sinks.to(device)
    tensors = (tensor.to(device) for tensor in (case.q, case.kv, case.block_tables, case.query_starts, case.seq_lens))
    return prefill_attention(
        *tensors, scale=case.scale, max_query_len=case.max_query_len, backend=backend, **options
    ).cpu()


def check(case: PagedCase, backend: Backend, device: str, **options: Any) -> None:
    expected = attend(case, Backend.REFERENCE, **options)
    assert_close(attend(case, backend, device, **options), expected)


def test_the_reference_equals_torch_attention() -> None:
    case = PagedCase(lengths=[37], query_lens=[37], num_heads=6, num_kv_heads=3)
    blocks = case.kv[case.block_tables[0, :3].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :37]
    keys, values = blocks.repeat_interleave(2, 1)

    expected = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(0, 1), keys, values, is_causal=True)

    assert_close(attend(case, Backend.REFERENCE), expected.transpose(0, 1).contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_prompts_cached_prefixes_and_single_tokens_mix(backend: Backend, device: str, dtype: torch.dtype) -> None:
    case = PagedCase(lengths=[40, 0, 100, 1, 65], query_lens=[40, 0, 7, 1, 1], dtype=dtype)

    check(case, backend, device)


def test_more_queries_than_a_tile_match_the_reference(backend: Backend, device: str) -> None:
    case = PagedCase(lengths=[210], query_lens=[150], num_heads=2, num_kv_heads=1, dtype=torch.bfloat16)

    check(case, backend, device)


@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
def test_grouped_heads_match_the_reference(backend: Backend, device: str, heads: tuple[int, int]) -> None:
    case = PagedCase(
        lengths=[50, 9], query_lens=[20, 9], num_heads=heads[0], num_kv_heads=heads[1], dtype=torch.bfloat16
    )

    check(case, backend, device)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_that_are_no_powers_of_two_match_the_reference(backend: Backend, device: str, head_dim: int) -> None:
    check(PagedCase(lengths=[33], query_lens=[17], head_dim=head_dim, dtype=torch.bfloat16), backend, device)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_matches_the_reference(backend: Backend, device: str, block_size: int) -> None:
    case = PagedCase(lengths=[150, 5], query_lens=[20, 5], block_size=block_size, dtype=torch.float16)

    check(case, backend, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [1, 16, 70, 4096])
def test_sliding_windows_match_the_reference(backend: Backend, device: str, window: int, dtype: torch.dtype) -> None:
    case = PagedCase(lengths=[3, 130], query_lens=[3, 60], num_heads=2, num_kv_heads=1, dtype=dtype)

    check(case, backend, device, sliding_window=window)


@pytest.mark.parametrize(
    "options",
    [{"soft_cap": 5.0}, {"with_sinks": True}, {"soft_cap": 2.0, "with_sinks": True, "sliding_window": 20}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_soft_cap_and_sinks_match_the_reference(
    backend: Backend, device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check(PagedCase(lengths=[1, 90], query_lens=[1, 33], dtype=dtype), backend, device, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300}], ids=str)
def test_prompts_longer_than_a_chunk_match_the_reference_on_cpus(options: dict[str, Any]) -> None:
    case = PagedCase(lengths=[700, 520], query_lens=[2 * QUERY_CHUNK + 30, 520], num_heads=3, num_kv_heads=1)

    check(case, Backend.CPU, "cpu", **options)


def test_no_tokens_give_an_empty_result(backend: Backend, device: str) -> None:
    assert attend(PagedCase(lengths=[], query_lens=[]), backend, device).shape == (0, 4, 16)


def test_a_chunk_does_not_depend_on_its_batch(backend: Backend, device: str) -> None:
    together = PagedCase(lengths=[80, 50], query_lens=[30, 50], num_heads=2, num_kv_heads=1)
    alone = PagedCase(lengths=[80, 50], query_lens=[30, 50], num_heads=2, num_kv_heads=1)
    alone.q, alone.block_tables, alone.seq_lens = alone.q[:30], alone.block_tables[:1], alone.seq_lens[:1]
    alone.query_starts, alone.query_lens = alone.query_starts[:2], [30]

    assert_close(attend(together, backend, device)[:30], attend(alone, backend, device), absolute=1e-6, relative=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_whole_grid_matches_the_reference(
    backend: Backend, device: str, head_dim: int, block_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    case = PagedCase(
        lengths=[1, 65, 129],
        query_lens=[1, 65, 30],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )

    check(case, backend, device)
    check(case, backend, device, sliding_window=33, with_sinks=True)
