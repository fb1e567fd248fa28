"""The comparison of sLSTM with its authors' kernel, without a GPU."""

import torch

from bench import slstm as bench_slstm
from deltarule import slstm


def test_weights_lie_as_the_authors_have_them():
    gates, recurrent = torch.randn(1, 3, 4, 2, 5), torch.randn(2, 5, 4, 5)
    o, before = bench_slstm.ours(gates, recurrent), torch.zeros(1, 1, 4, 2, 5)
    first = slstm(gates[:, :1].transpose(2, 3), torch.zeros(2, 4, 5, 5)).o
    # From the output of a head to each of its gates.
    before[:, 0] = torch.einsum("bhc,hcgd->bghd", first[:, 0], recurrent)
    expected = slstm(
        torch.cat([gates[:, :1], gates[:, 1:2] + before], 1).transpose(2, 3),
        torch.zeros(2, 4, 5, 5),
    ).o
    torch.testing.assert_close(o[:, 1], expected[:, 1])
