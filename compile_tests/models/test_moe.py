"""Experts: the same result whichever way they are computed, and no work for those that were not chosen."""

import pytest
import torch
import torch._dynamo
from torch import Tensor

from inertiakv.models import MoEConfig
from inertiakv.models.moe import Experts, SparseMLP, _grouped


def make(experts: int, top_k: int, hidden: int = 32, width: int = 24, normalise: bool = True) -> SparseMLP:
    mlp = SparseMLP(hidden, MoEConfig(experts, top_k, width, normalise, (True,)))
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return mlp


def by_hand(mlp: SparseMLP, x_NE: Tensor) -> Tensor:
    """Token by token, expert by expert, in float64."""
    rows = []
    for x in x_NE.double():
        share = torch.softmax(mlp.gate.weight.double() @ x, 0)
        value, chosen = share.topk(mlp.top_k)
        value = value / value.sum() if mlp.normalise else value
        row = torch.zeros_like(x)
        for weight, expert in zip(value, chosen.tolist(), strict=True):
            gate, up = (mlp.experts.gate_up_XOI[expert].double() @ x).chunk(2)
            row += weight * (mlp.experts.down_XOI[expert].double() @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("experts,top_k", [(1, 1), (5, 2), (16, 4), (4, 4)])
def test_against_one_token_at_a_time(experts: int, top_k: int, tokens: int, normalise: bool) -> None:
    mlp = make(experts, top_k, normalise=normalise)
    x = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mlp(x)[0].double(), by_hand(mlp, x[0]), rtol=1e-4, atol=1e-5)


def test_experts_that_are_not_chosen_are_not_read() -> None:
    mlp = make(8, 2)
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))
    expected = mlp(x)
    chosen = mlp.gate(x[0]).topk(2).indices.flatten()
    idle = torch.ones(8, dtype=torch.bool).index_fill_(0, chosen, False)
    assert idle.any()
    mlp.experts.gate_up_XOI[idle] = torch.nan
    mlp.experts.down_XOI[idle] = torch.nan
    assert torch.equal(mlp(x), expected)
    assert torch.equal(torch.compile(mlp, fullgraph=True, backend="eager")(x).isnan(), expected.isnan())


def test_all_tokens_to_one_expert() -> None:
    mlp = make(4, 1)
    mlp.gate.weight.zero_()  # a tie everywhere
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mlp(x)[0].double(), by_hand(mlp, x[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("inputs,outputs", [(32, 16), (31, 16), (32, 15)])
def test_grouped_product(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(11, inputs, generator=generator).to(dtype)
    weight_XOI = torch.randn(5, outputs, inputs, generator=generator).to(dtype)
    ends = [0, 4, 4, 10, 11]
    actual = _grouped(x_RI, weight_XOI, torch.tensor(ends, dtype=torch.int32))
    assert actual.dtype == dtype
    start = 0
    for expert, end in enumerate(ends):
        expected = x_RI[start:end].double() @ weight_XOI[expert].double().T
        tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-5)
        torch.testing.assert_close(actual[start:end].double(), expected, rtol=tolerance, atol=tolerance)
        start = end


def test_router_statistics_in_float32() -> None:
    mlp = make(6, 2).to(torch.bfloat16)
    seen: list[torch.dtype] = []
    softmax = torch.softmax

    def watch(*args: Tensor, **options: object) -> Tensor:
        result = softmax(*args, **options)  # type: ignore[arg-type]
        seen.append(result.dtype)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", watch)
        assert mlp(torch.randn(1, 2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert seen == [torch.float32]


def test_checkpoint_views_cover_the_experts() -> None:
    experts = Experts(32, MoEConfig(3, 1, 24, True, (True,)))
    for parameter in experts.parameters():
        parameter.fill_(0.0)
    views = dict(experts.checkpoint_views())
    assert len(views) == 9
    for view in views.values():
        view.add_(1.0)
    assert all((parameter == 1.0).all() for parameter in experts.parameters())
