from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry_kernels.dispatch import Backend
from kvferry_kernels.paged_attention import decode_attention
from kvferry_kernels.paged_attention.cpu import MAX_PADDED_TOKENS, length_groups
from kvferry_kernels.testing import BLOCK_SIZES, DTYPES, HEAD_COUNTS, HEAD_DIMS, PagedCase, assert_close


def decode_case(lengths: list[int], **options: Any) -> PagedCase:
    return PagedCase(lengths=lengths, query_lens=[1] * len(lengths), **options)


def attend(case: PagedCase, backend: Backend, device: str = "cpu", **options: Any) -> Tensor:
    if options.pop("with_sinks", False):
        options["sinks"] = case.sinks.to(device)
    tensors = (tensor.to(device) for tensor in (case.q, case.kv, case.block_tables, case.seq_lens))
    return decode_attention(*tensors, scale=case.scale, backend=backend, **options).cpu()


def check(case: PagedCase, backend: Backend, device: str, **options: Any) -> None:
    expected = attend(case, Backend.REFERENCE, **options)
    assert_close(attend(case, backend, device, **options), expected)


def test_the_reference_equals_torch_attention() -> None:
    case = decode_case([37], num_heads=6, num_kv_heads=3)
    blocks = case.kv[case.block_tables[0, :3].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :37]
    keys, values = blocks.repeat_interleave(2, 1)

    expected = torch.nn.functional.scaled_dot_product_attention(case.q[0, :, None], keys, values)

    assert_close(attend(case, Backend.REFERENCE)[0], expected[:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_different_and_no_length_match_the_reference(backend: Backend, device: str, dtype: torch.dtype) -> None:
    check(decode_case([1, 0, 16, 33, 100], dtype=dtype), backend, device)


@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
def test_grouped_heads_match_the_reference(backend: Backend, device: str, heads: tuple[int, int]) -> None:
    check(decode_case([7, 40], num_heads=heads[0], num_kv_heads=heads[1]), backend, device)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_that_are_no_powers_of_two_match_the_reference(backend: Backend, device: str, head_dim: int) -> None:
    check(decode_case([33], head_dim=head_dim, dtype=torch.bfloat16), backend, device)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_matches_the_reference(backend: Backend, device: str, block_size: int) -> None:
    check(decode_case([150, 5], block_size=block_size, dtype=torch.float16), backend, device)


@pytest.mark.parametrize("window", [1, 16, 50, 4096])
def test_sliding_windows_match_the_reference(backend: Backend, device: str, window: int) -> None:
    check(decode_case([0, 3, 49, 120]), backend, device, sliding_window=window)


@pytest.mark.parametrize(
    "options",
    [{"soft_cap": 5.0}, {"with_sinks": True}, {"soft_cap": 2.0, "with_sinks": True, "sliding_window": 20}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_soft_cap_and_sinks_match_the_reference(
    backend: Backend, device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check(decode_case([1, 64, 90], dtype=dtype), backend, device, **options)


@pytest.mark.parametrize("options", [{}, {"with_sinks": True}, {"sliding_window": 700}], ids=str)
def test_sequences_over_many_splits_match_the_reference(backend: Backend, device: str, options: dict[str, Any]) -> None:
    case = decode_case([1300, 2, 511], num_heads=2, num_kv_heads=1, block_size=128, dtype=torch.bfloat16)

    check(case, backend, device, **options)


def test_large_scores_keep_their_accuracy_in_bf16(backend: Backend, device: str) -> None:
    case = decode_case([200], dtype=torch.bfloat16, head_dim=64)
    case.q *= 6

    check(case, backend, device)


def test_an_empty_batch_gives_an_empty_result(backend: Backend, device: str) -> None:
    assert attend(decode_case([]), backend, device).shape == (0, 4, 16)


def test_a_sequence_does_not_depend_on_its_batch(backend: Backend, device: str) -> None:
    together = decode_case([5, 300, 41], num_heads=2, num_kv_heads=1)
    alone = decode_case([5, 300, 41], num_heads=2, num_kv_heads=1)
    alone.q, alone.block_tables, alone.seq_lens = alone.q[2:], alone.block_tables[2:], alone.seq_lens[2:]

    assert_close(attend(together, backend, device)[2:], attend(alone, backend, device), absolute=1e-6, relative=0.0)


def test_groups_bound_their_padding() -> None:
    groups = length_groups([100, 1, 99, 0, 2], block_size=32)

    assert groups == [[0, 2], [4, 1]]
    assert all(rows for rows in groups) and MAX_PADDED_TOKENS < 98 * 32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_whole_grid_matches_the_reference(
    backend: Backend, device: str, head_dim: int, block_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    case = decode_case(
        [1, 65, 129],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )

    check(case, backend, device)
    check(case, backend, device, sliding_window=33, with_sinks=True)
