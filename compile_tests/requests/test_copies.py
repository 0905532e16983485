"""Configs and text objects that are copied, pickled, or sent to another process."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from compile_tests.models.reference import FAMILIES, raw_config
from compile_tests.tiny_chat import tiny_tokenizer
from inertiakv import POLICIES, Sampling, StopStrings, TextStream, policy
from inertiakv.models import parse_config

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}
CONFIGS = {
    **{name: policy(name) for name in POLICIES if policy(name) is not None},
    "an eviction with a schedule": policy("inertiakv", refresh=4, sinks=2, layers=None),
    "greedy": Sampling(),
    "sampling": Sampling(temperature=0.5, top_k=3, seed=[1, 2]),
    **{family: parse_config(raw_config(family, dtype="bfloat16")) for family in FAMILIES},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, way: str) -> None:
    config = CONFIGS[name]
    again = WAYS[way](config)
    assert again == config
    assert repr(again) == repr(config)


@pytest.mark.slow
def test_configs_in_another_process() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(repr, CONFIGS.values())) == list(map(repr, CONFIGS.values()))


@pytest.mark.parametrize("way", WAYS)
def test_stop_strings(way: str) -> None:
    tokenizer = tiny_tokenizer()
    stop = WAYS[way](StopStrings(tokenizer, ["bc", "x"]))
    ids = tokenizer("abcd", add_special_tokens=False)["input_ids"]
    assert [stop(0, ids[:n]) for n in range(1, 4)] == [False, False, True]
    assert stop.cut("abcd") == "a"


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_of_text_goes_on_on_its_own(way: str) -> None:
    tokenizer = tiny_tokenizer()
    first, *rest = tokenizer("aöü", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    shown = stream.push(first) + stream.push(rest[0])
    other = WAYS[way](stream)
    assert shown + "".join(map(other.push, rest[1:])) + other.end() == "aöü"
    assert shown + "".join(map(stream.push, rest[1:])) + stream.end() == "aöü"
