import pytest
import torch

from kvferry_kernels.dispatch import Backend
from kvferry_kernels.merge import merge_states
from kvferry_kernels.testing import assert_close


@pytest.mark.parametrize("num_parts", [1, 3, 8, 17])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_merged_parts_equal_attention_over_all_keys(
    backend: Backend, device: str, num_parts: int, head_dim: int
) -> None:
    scores, values = torch.randn(5, num_parts, 11), torch.randn(5, num_parts, 11, head_dim)
    partial_out = torch.einsum("rpk,rpkd->rpd", scores.softmax(-1), values)
    expected = torch.einsum("rk,rkd->rd", scores.flatten(1).softmax(-1), values.flatten(1, 2))

    out, lse = merge_states(partial_out.to(device), scores.logsumexp(-1).to(device), torch.float32, backend=backend)

    assert_close(out.cpu(), expected)
    assert_close(lse.cpu(), scores.flatten(1).logsumexp(-1))


def test_empty_parts_are_not_read_and_empty_rows_are_zero(backend: Backend, device: str) -> None:
    partial_out = torch.randn(3, 2, 16)
    partial_lse = torch.tensor([[0.5, float("-inf")], [float("-inf"), float("-inf")], [1.0, 1.0]])
    partial_out[0, 1] = float("nan")
    partial_out[1] = float("nan")

    out, lse = merge_states(partial_out.to(device), partial_lse.to(device), torch.float16, backend=backend)

    assert_close(out.cpu(), torch.stack((partial_out[0, 0], torch.zeros(16), partial_out[2].mean(0))).half())
    assert lse.tolist() == pytest.approx([0.5, float("-inf"), 1.0 + torch.tensor(2.0).log().item()])
