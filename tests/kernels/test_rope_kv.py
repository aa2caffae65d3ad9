import pytest
import torch
from torch import Tensor

from kvferry_kernels.dispatch import Backend
from kvferry_kernels.rope_kv import rope_and_write
from kvferry_kernels.testing import DTYPES, assert_close, poisoned, random_tensor


def run(
    backend: Backend,
    device: str,
    dtype: torch.dtype,
    *,
    head_dim: int = 16,
    rotary_dim: int = 16,
    heads: tuple[int, int] = (6, 2),
    slots: tuple[int, ...] = (16, 17, -1, 63, 0),
    merged: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, the cache, and the untouched values of one call over random inputs."""
    generator = torch.Generator().manual_seed(3)
    num_heads, num_kv_heads = heads
    tokens = len(slots)
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = random_tensor(generator, tokens, sum(widths), dtype=dtype).to(device)
    parts = torch.split(qkv, widths, 1) if merged else [part.clone() for part in torch.split(qkv, widths, 1)]
    q, k, v = (part.view(tokens, part.shape[1] // head_dim, head_dim) for part in parts)
    values = v.clone()
    kv = poisoned(4, 2, num_kv_heads, 16, head_dim, dtype=dtype, device=device)
    angles = torch.rand(100, rotary_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    positions = torch.randint(0, 100, (tokens,), generator=generator).to(device)
    rope_and_write(
        q, k, v, positions, cos_sin, kv, torch.tensor(slots, dtype=torch.int64, device=device), backend=backend
    )
    return q.cpu(), kv.cpu(), values.cpu()


def check(backend: Backend, device: str, dtype: torch.dtype, **options: object) -> None:
    q, kv, _ = run(backend, device, dtype, **options)  # type: ignore[arg-type]
    expected_q, expected_kv, _ = run(Backend.REFERENCE, "cpu", dtype, **options)  # type: ignore[arg-type]
    assert_close(q, expected_q)
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    assert_close(kv.nan_to_num(), expected_kv.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_rotate_and_keys_and_values_reach_their_slots(
    backend: Backend, device: str, dtype: torch.dtype
) -> None:
    check(backend, device, dtype)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 80), (96, 48), (128, 128), (64, 16)])
def test_partial_rotation_and_odd_head_dims(backend: Backend, device: str, head_dim: int, rotary_dim: int) -> None:
    check(backend, device, torch.float32, head_dim=head_dim, rotary_dim=rotary_dim)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1)])
def test_any_number_of_heads(backend: Backend, device: str, heads: tuple[int, int]) -> None:
    check(backend, device, torch.float32, heads=heads)


def test_tensors_that_are_no_views_of_one_qkv(backend: Backend, device: str) -> None:
    check(backend, device, torch.float32, merged=False)


def test_values_are_copied_bit_by_bit_and_padding_is_not_written(backend: Backend, device: str) -> None:
    _, kv, values = run(backend, device, torch.bfloat16)

    assert torch.equal(kv[1, 1, :, 0], values[0])
    assert torch.equal(kv[3, 1, :, 15], values[3])
    assert kv[:, 1].isnan().all(-1).sum() == (4 * 16 - 4) * 2


def test_no_tokens(backend: Backend, device: str) -> None:
    check(backend, device, torch.float32, slots=())


def test_rotation_keeps_relative_positions() -> None:
    cos_sin = torch.cat((torch.outer(torch.arange(50.0), torch.tensor([1.0, 0.3])),) * 2, 1)
    cos_sin = torch.cat((cos_sin[:, :2].cos(), cos_sin[:, 2:].sin()), 1)
    q, k = torch.randn(4), torch.randn(4)

    def product(query_position: int, key_position: int) -> Tensor:
        kv = torch.zeros(1, 2, 1, 16, 4)
        queries, keys = q.repeat(2, 1, 1), k.repeat(2, 1, 1)
        positions = torch.tensor([query_position, key_position])
        rope_and_write(
            queries, keys, keys.clone(), positions, cos_sin, kv, torch.tensor([0, 1]), backend=Backend.REFERENCE
        )
        return queries[0, 0] @ kv[0, 0, 0, 1]

    assert_close(product(40, 33), product(9, 2))
