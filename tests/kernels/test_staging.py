import pytest
import torch

from kvferry_kernels import staging
from kvferry_kernels.dispatch import Backend
from kvferry_kernels.testing import DTYPES, poisoned

BLOCKS = torch.tensor([4, 0, 2], dtype=torch.int32)


def storage(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 5, 2, 3, 16, 24).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("layers", "heads"), [((0, 4), (0, 3)), ((1, 3), (2, 3)), ((3, 4), (0, 2))])
def test_payload_bytes_and_checksum_match_the_reference(
    backend: Backend, device: str, layers: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    cache = storage(dtype)
    out, expected = (poisoned(300_000, dtype=torch.uint8) for _ in range(2))
    out = out.to(device)

    num_bytes, sums = staging.gather_blocks_checksum(
        cache.to(device), BLOCKS.to(device), layers, heads, out, backend=backend
    )

    assert num_bytes == staging.gather_blocks(cache, BLOCKS, layers, heads, expected, backend=Backend.REFERENCE)
    assert torch.equal(out.cpu(), expected)
    assert sums == staging.checksum(expected[:num_bytes], backend=Backend.REFERENCE)
    assert sums == staging.checksum(out[:num_bytes], backend=backend)


def test_payload_order_is_layer_block_side_head() -> None:
    cache = storage(torch.float32)
    out = torch.zeros(400_000, dtype=torch.uint8)

    num_bytes = staging.gather_blocks(cache, BLOCKS, (1, 3), (1, 3), out)

    values = out[:num_bytes].view(torch.float32).view(2, 3, 2, 2, 16, 24)
    assert torch.equal(values[1, 2, 0, 1], cache[2, 2, 0, 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_writes_what_was_gathered_and_nothing_else(backend: Backend, device: str, dtype: torch.dtype) -> None:
    cache = storage(dtype).to(device)
    payload = torch.zeros(300_000, dtype=torch.uint8, device=device)
    num_bytes, sums = staging.gather_blocks_checksum(cache, BLOCKS.to(device), (1, 3), (1, 3), payload, backend=backend)
    target = torch.zeros_like(cache)
    blocks = torch.tensor([1, 3, 0], dtype=torch.int32, device=device)

    assert staging.scatter_blocks_checksum(payload, target, blocks, (0, 2), (0, 2), backend=backend) == sums

    expected = torch.zeros_like(cache)
    expected[:2, blocks.long(), :, :2] = cache[1:3, BLOCKS.long().to(device)][:, :, :, 1:3]
    assert torch.equal(target, expected)
    again = torch.zeros_like(cache)
    staging.scatter_blocks(payload[:num_bytes], again, blocks, (0, 2), (0, 2), backend=backend)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4096, 8192 * 3 + 24, 50_001])
def test_checksums_of_any_length_match_the_reference(backend: Backend, device: str, length: int) -> None:
    payload = torch.randint(0, 256, (length,), dtype=torch.uint8)

    assert staging.checksum(payload.to(device), backend=backend) == staging.checksum(payload, backend=Backend.REFERENCE)


def test_checksums_see_flipped_bits_and_swapped_words(backend: Backend, device: str) -> None:
    payload = torch.randint(0, 256, (4096,), dtype=torch.uint8).to(device)
    flipped, swapped = payload.clone(), payload.clone()
    flipped[100] ^= 1
    swapped[:8], swapped[8:16] = payload[8:16], payload[:8]

    sums = {staging.checksum(data, backend=backend) for data in (payload, flipped, swapped)}

    assert len(sums) == 3


def test_no_blocks(backend: Backend, device: str) -> None:
    out = torch.zeros(8, dtype=torch.uint8, device=device)
    blocks = torch.empty(0, dtype=torch.int32, device=device)

    result = staging.gather_blocks_checksum(
        storage(torch.float32).to(device), blocks, (0, 4), (0, 3), out, backend=backend
    )

    assert result == (0, (0, 0))
