import pytest
import torch

from kvferry_kernels.dispatch import Backend
from kvferry_kernels.rms_norm import rms_norm
from kvferry_kernels.silu_mul import silu_mul
from kvferry_kernels.testing import DTYPES, ODD_SIZES, assert_close


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [*ODD_SIZES, 576])
def test_rms_norm_matches_the_reference(backend: Backend, device: str, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(19, width).to(dtype), torch.randn(width).to(dtype)

    actual = rms_norm(x.to(device), weight.to(device), 1e-5, backend=backend).cpu()

    assert_close(actual, rms_norm(x, weight, 1e-5, backend=Backend.REFERENCE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_adds_into_the_residual_first(backend: Backend, device: str, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 65).to(dtype), torch.randn(5, 65).to(dtype), torch.randn(65).to(dtype)
    added, expected_added = residual.clone().to(device), residual.clone()

    actual = rms_norm(x.to(device), weight.to(device), 1e-5, residual=added, backend=backend).cpu()

    expected = rms_norm(x, weight, 1e-5, residual=expected_added, backend=Backend.REFERENCE)
    assert_close(added.cpu(), expected_added)
    assert_close(actual, expected)


def test_rms_norm_takes_heads_as_a_view_of_the_merged_qkv(backend: Backend, device: str) -> None:
    qkv, weight = torch.randn(7, 5 * 16), torch.randn(16)
    heads = qkv[:, 16 : 4 * 16].view(7, 3, 16)

    actual = rms_norm(heads.to(device), weight.to(device), 1e-6, backend=backend).cpu()

    assert actual.is_contiguous()
    assert_close(actual, rms_norm(heads, weight, 1e-6, backend=Backend.REFERENCE))


def test_rms_norm_multiplies_fp32_weights_before_rounding(backend: Backend, device: str) -> None:
    x, weight = torch.randn(3, 32).bfloat16(), 1 + torch.randn(32) / 1000

    actual = rms_norm(x.to(device), weight.to(device), 1e-6, backend=backend).cpu()

    assert_close(actual, rms_norm(x, weight, 1e-6, backend=Backend.REFERENCE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", ODD_SIZES)
def test_silu_mul_matches_the_reference(backend: Backend, device: str, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * width).to(dtype)

    assert_close(silu_mul(x.to(device), backend=backend).cpu(), silu_mul(x, backend=Backend.REFERENCE))


def test_no_rows(backend: Backend, device: str) -> None:
    assert silu_mul(torch.empty(0, 8, device=device), backend=backend).shape == (0, 4)
    assert rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-5, backend=backend).shape == (
        0,
        8,
    )
