"""Rotary positions: frequencies against the reference, phases against float64 up to position 131,072."""

from typing import Any

import pytest
import torch

from compile_tests.models.reference import reference_config
from inertiakv.models.rope import RopeConfig, Rotary, inverse_frequencies, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn attention_factor": YARN | {"attention_factor": 1.0},
    "yarn mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn mscale alone": YARN | {"mscale": 0.7},
    "yarn betas": YARN | {"beta_fast": 20, "beta_slow": 3, "truncate": False},
}


def rope(parameters: dict[str, Any], **raw: Any) -> RopeConfig:
    return RopeConfig.from_dict({"max_position_embeddings": 131072, "rope_parameters": parameters} | raw)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_the_reference(name: str, head_dim: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = PARAMETERS[name]
    config = reference_config(
        "llama", rope_parameters=parameters, head_dim=head_dim, max_position_embeddings=131072
    )
    ours = rope(parameters)
    if name == "default":
        expected = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        factor = 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", PARAMETERS)
def test_both_spellings(name: str) -> None:
    parameters = PARAMETERS[name]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    old = {"max_position_embeddings": 131072, "rope_theta": parameters["rope_theta"]}
    assert RopeConfig.from_dict(old | {"rope_scaling": scaling}) == rope(parameters)
    scaling["type"] = scaling.pop("rope_type")
    assert RopeConfig.from_dict(old | {"rope_scaling": scaling}) == rope(parameters)


def test_absent_is_default() -> None:
    expected = RopeConfig("default", 10000.0)
    assert RopeConfig.from_dict({"rope_scaling": None}) == expected
    assert RopeConfig.from_dict({"rope_parameters": None, "rope_theta": 10000}) == expected


def test_original_length_and_factor_follow_from_the_config() -> None:
    outside = rope({"rope_type": "yarn", "factor": None}, original_max_position_embeddings=32768)
    assert (outside.factor, outside.original_max_positions) == (4.0, 32768)
    assert rope({"rope_type": "yarn", "factor": 4.0}).original_max_positions == 131072


@pytest.mark.parametrize(
    "parameters,message",
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "longrope"),
        ({"type": "su"}, "'su'"),
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2}, "-2"),
        ({"rope_type": "linear", "factor": "2"}, "'2'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor 0.5"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_what_is_not_understood(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(parameters)


def test_partial_rotation_outside_the_rope_parameters() -> None:
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.25"):
        rope({}, partial_rotary_factor=0.25)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_phases_to_131072(name: str) -> None:
    config = rope(PARAMETERS[name])
    rotary = Rotary(config, 128).to(torch.bfloat16)
    positions = torch.cat([torch.arange(300), torch.arange(131072 - 300, 131073)])[None]
    exact = Rotary(config, 128)
    phase = positions[..., None].double() * exact.inv_freq_R.double()
    for actual, expected in zip(rotary(positions, torch.float32), (phase.cos(), phase.sin()), strict=True):
        assert actual.dtype == torch.float32
        # The phase itself is rounded to 24 bits, which at 131,072 is 2^-8 of a radian or less.
        error = (actual.double() - config.attention_factor * expected).abs()
        assert error.max() < 2**-7
        assert error[:, :300].max() < 2**-15
    # No two neighbours coincide, as they do where phases are bfloat16.
    cos = rotary(positions, torch.float32)[0][0]
    assert (cos[1:] != cos[:-1]).any(-1).all()


def test_frequencies_in_float64() -> None:
    """The frequencies are rounded once: the phase error at the far end is the rounding's and no more."""
    exact = 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    error = (inverse_frequencies(RopeConfig(), 128).double() - exact).abs() / exact
    assert error.max() <= 2**-24


def test_rotation_is_relative_and_keeps_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=generator, dtype=torch.float64)
    rotary = Rotary(RopeConfig(), 64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, rotary(torch.tensor([[position]]), torch.float64))

    near, far = at(q, 20) * at(k, 13), at(q, 100020) * at(k, 100013)
    torch.testing.assert_close(near.sum(), far.sum())
    torch.testing.assert_close(at(q, 77).norm(), q.norm())


def test_padding_is_harmless() -> None:
    cos, sin = Rotary(RopeConfig(), 64)(torch.tensor([[-1, 0]]), torch.float32)
    assert torch.equal(cos[:, 0], cos[:, 1])
    assert torch.equal(sin[:, 0], sin[:, 1])
