"""InertiaCache in programs that use a model from several threads, under autocast, and that copy models."""

import copy
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compile_tests.integrations.hf import Talk, generate, padded, pair, prompts
from inertiakv import EvictionConfig
from inertiakv.integrations.transformers import InertiaCache

RULE = EvictionConfig(budget=12, refresh=2)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_each_thread_gets_the_answer_that_it_gets_alone() -> None:
    model, _ = pair("llama")
    batches = [padded(prompts(30 + 5 * i, 20, seed=i)) for i in range(8)]

    def answer(i: int, ours: bool) -> Any:
        return generate(model, *batches[i], 8, InertiaCache(model, RULE) if ours else None)

    jobs = [(i, ours) for i in range(8) for ours in (True, False)]
    expected = {job: answer(*job) for job in jobs}
    answers: dict[tuple[int, bool], Any] = {}

    def run(job: tuple[int, bool]) -> None:
        try:
            answers[job] = answer(*job)
        except Exception as error:
            answers[job] = error

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected


def test_autocast() -> None:
    """K and V are kept as autocast computes them, in every layer alike."""
    model, _ = pair("llama")
    cache = InertiaCache(model, RULE)
    with torch.autocast("cpu", torch.bfloat16):
        talk = Talk(model, cache)
        talk.say(prompts(30, 20), 6)
        talk.say(prompts(8, 8), 6)
    assert cache.slots is not None
    assert {layer.k_BGND.dtype for layer in cache.slots.layers} == {torch.bfloat16}
    nothing_evicted = EvictionConfig(budget=500)
    with torch.autocast("cpu", torch.bfloat16):
        plain = generate(model, *padded(prompts(30)), 1)
        assert generate(model, *padded(prompts(30)), 1, InertiaCache(model, nothing_evicted)) == plain


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_one_of_its_own(copied: Any) -> None:
    # One that no other test has: transformers may leave hooks in a model that cannot be pickled.
    model, _ = pair("llama", rms_norm_eps=2e-6)
    expected = generate(model, *padded(prompts(30)), 6, InertiaCache(model, RULE))
    plain = generate(model, *padded(prompts(30)), 6)
    other = copied(model)
    assert generate(other, *padded(prompts(30)), 6) == plain
    assert generate(other, *padded(prompts(30)), 6, InertiaCache(other, RULE)) == expected
    with pytest.raises(ValueError, match="was made for another model"):
        generate(other, *padded(prompts(30)), 6, InertiaCache(model, RULE))


def test_a_prompt_is_read_once_and_its_cache_copied() -> None:
    model, _ = pair("llama")
    turns = [prompts(8, seed=seed) for seed in (4, 5)]
    talk = Talk(model, InertiaCache(model, RULE))
    talk.say(prompts(30), 4)
    answers = []
    for turn in turns:
        branch = Talk(model, copy.deepcopy(talk.cache))
        branch.ids_BS, branch.mask_BS = talk.ids_BS, talk.mask_BS
        answers.append(branch.say(turn, 6))
    for turn, answer in zip(turns, answers, strict=True):
        whole = Talk(model, InertiaCache(model, RULE))
        whole.say(prompts(30), 4)
        assert whole.say(turn, 6) == answer
    with pytest.raises(TypeError, match="an InertiaCache cannot be pickled"):
        pickle.dumps(talk.cache)


def test_a_change_of_attention_is_followed() -> None:
    model = copy.deepcopy(pair("llama", rms_norm_eps=3e-6)[0])  # see above
    expected = generate(model, *padded(prompts(30)), 6, InertiaCache(model, RULE))
    model.set_attn_implementation("eager")
    assert generate(model, *padded(prompts(30)), 6, InertiaCache(model, RULE)) == expected
    weights = model(torch.ones(1, 5, dtype=torch.int64), output_attentions=True).attentions
    assert weights[0].shape == (1, 4, 5, 5)
