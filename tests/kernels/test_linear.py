import pytest
import torch

from kvferry_kernels.linear import can_pack, linear, pack
from kvferry_kernels.linear.reference import linear as reference
from kvferry_kernels.testing import DTYPES, assert_close


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear_matches_the_reference(with_bias: bool, rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 65).to(dtype), (torch.randn(33, 65) / 8).to(dtype)
    bias = torch.randn(33).to(dtype) if with_bias else None

    actual = linear(x, pack(weight), bias)

    assert_close(actual, reference(x, weight, bias))


def test_weights_that_cannot_be_packed_stay_as_they_are() -> None:
    weight = torch.randn(4, 8, dtype=torch.float64)

    packed = pack(weight)

    assert not packed.is_packed
    expected = weight.sum(1).expand(2, 4)
    assert_close(linear(torch.ones(2, 8, dtype=torch.float64), packed), expected, absolute=1e-9, relative=0.0)


def test_packed_weights_know_their_shape() -> None:
    packed = pack(torch.randn(12, 20))

    assert (packed.out_features, packed.in_features) == (12, 20)
    assert packed.is_packed == can_pack(torch.float32)


def test_a_row_does_not_depend_on_its_batch() -> None:
    x, packed = torch.randn(64, 96), pack(torch.randn(48, 96))

    assert_close(linear(x, packed)[5:6], linear(x[5:6], packed), absolute=1e-5, relative=0.0)
