"""Every way to write RoPE into a config.json: read as transformers reads it, or an error."""

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.models.reference import raw_config
from inertiakv.models import parse_config
from inertiakv.models.rope import inverse_frequencies

LENGTH = "original_max_position_embeddings"
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, LENGTH: 64}
YARN_SHORT = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 64}


def old(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type" if key == "rope_type" else key: value for key, value in parameters.items()}


SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta alone": {"rope_theta": 1e6},
    "parameters": {"rope_parameters": YARN},
    "parameters with theta": {"rope_parameters": YARN | {"rope_theta": 1e5}},
    "parameters, theta beside them": {"rope_parameters": YARN, "rope_theta": 1e6},
    "parameters with theta, another beside them": {
        "rope_parameters": YARN | {"rope_theta": 1e5},
        "rope_theta": 1e6,
    },
    "scaling": {"rope_scaling": YARN, "rope_theta": 1e6},
    "scaling by type": {"rope_scaling": old(YARN), "rope_theta": 1e6},
    "scaling by both": {"rope_scaling": YARN | {"type": "yarn"}},
    "scaling by both, which differ": {"rope_scaling": YARN | {"type": "linear"}},
    "empty scaling": {"rope_parameters": YARN, "rope_scaling": {}},
    "no scaling": {"rope_parameters": YARN, "rope_scaling": None},
    "no parameters": {"rope_parameters": None, "rope_scaling": YARN},
    "scaling beside parameters": {"rope_parameters": DEFAULT, "rope_scaling": YARN},
    "scaling by type beside parameters": {"rope_parameters": DEFAULT, "rope_scaling": old(YARN)},
    "linear beside parameters": {
        "rope_parameters": DEFAULT,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "theta in both": {
        "rope_parameters": DEFAULT | {"rope_theta": 1e6},
        "rope_scaling": YARN | {"rope_theta": 1e6},
    },
    "theta beside both": {
        "rope_parameters": DEFAULT | {"rope_theta": 1e6},
        "rope_scaling": YARN,
        "rope_theta": 1e6,
    },
    "default beside yarn": {"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}},
    "yarn beside yarn": {"rope_parameters": YARN | {"factor": 2.0}, "rope_scaling": YARN},
    "length outside": {"rope_scaling": YARN_SHORT, LENGTH: 64},
    "length within and outside": {"rope_scaling": YARN, LENGTH: 128},
    "length in parameters and outside": {"rope_parameters": YARN, LENGTH: 128},
    "no length": {"rope_scaling": YARN_SHORT},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3, length within and outside": {"rope_scaling": LLAMA3, LENGTH: 128},
    "no factor": {"rope_scaling": YARN | {"factor": None}},
    "nulls": {"rope_scaling": YARN | {"attention_factor": None, "beta_fast": None, "truncate": None}},
    "mscale of zero": {"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "dynamic with a length": {"rope_scaling": {"type": "dynamic", "factor": 2.0, LENGTH: 64}},
}


def reference_rotary(folder: Path, family: str, raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(folder)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, f"{family.title().replace('_', '')}RotaryEmbedding")(config)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_as_transformers_reads_it(tmp_path: Path, name: str, family: str) -> None:
    # The head is wide, so that frequencies show which length and which theta were taken.
    raw = raw_config(family, head_dim=64, **SPELLINGS[name])
    expected, rope = reference_rotary(tmp_path, family, raw), parse_config(raw).rope
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected.inv_freq, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize(
    "spelling,message",
    [
        # transformers would lose the theta.
        (
            {"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_scaling": YARN},
            r"theta 10000\.0.*rope_theta 1000000\.0",
        ),
        (
            {"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 1e6},
            r"theta 1000000\.0.*rope_theta 10000\.0",
        ),
        # It would take these for the default.
        ({"rope_scaling": {"factor": 4.0}}, "'factor'.*'default'"),
        ({"rope_parameters": {"factor": 4.0}}, "'factor'.*'default'"),
        ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}, "rope_scaling": YARN}, "partial"),
        ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 1}, "partial_rotary_factor": 0.5}, "0.5"),
        # It fails on these, too.
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be an object"),
        ({"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": 1}}, "mscale"),
        ({"rope_scaling": YARN | {"factor": float("inf")}}, "factor"),
        ({"rope_scaling": YARN, "max_position_embeddings": "absent"}, "max_position_embeddings"),
    ],
)
def test_errors(spelling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(raw_config("llama", **spelling))


def test_scaling_that_is_not_taken_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "inertiakv"):
        parse_config(raw_config("llama", **SPELLINGS["scaling beside parameters"]))
        assert not caplog.messages
        parse_config(raw_config("llama", **SPELLINGS["default beside yarn"]))
    (message,) = caplog.messages
    assert "rope_parameters of type 'yarn'" in message
