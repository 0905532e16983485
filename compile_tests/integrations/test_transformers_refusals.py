"""What InertiaCache refuses, and that it leaves the model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CompileConfig,
)
from transformers.generation import utils as generation_utils

from compile_tests.integrations.hf import Talk, generate, other, other_config, padded, pair, prompts
from inertiakv import EvictionConfig, policy
from inertiakv.integrations.transformers import InertiaCache

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

RULE = EvictionConfig(budget=10)


def snapshot(model: Any) -> Any:
    hooks = [(m._forward_hooks, m._forward_pre_hooks, vars(m).keys()) for m in model.modules()]
    return model.config.to_dict(), model.config._attn_implementation, type(model), repr(hooks)


def test_the_model_is_left_as_it_was() -> None:
    model, _ = pair("llama")
    names = [name for name, module in model.named_modules() if name.endswith("self_attn")]
    InertiaCache(model, RULE)  # from which on its attention layers know ours
    assert {id(model.get_submodule(name).config.of_model) for name in names} == {id(model.config)}
    before = snapshot(model)
    during = []
    hook = model.model.layers[1].register_forward_hook(
        lambda *_: during.append(model.config._attn_implementation)
    )
    generate(model, *padded(prompts(30, 20)), 4, InertiaCache(model, RULE))
    hook.remove()
    assert set(during) == {"sdpa"}
    assert snapshot(model) == before


def test_a_turn_without_what_was_before() -> None:
    model, _ = pair("llama")
    cache = InertiaCache(model, RULE)
    generate(model, *padded(prompts(30)), 4, cache)
    before = snapshot(model)
    ours = (ValueError, "nothing new: a further turn takes the whole conversation")
    # an older `generate` cuts the prompt by itself, and fails before the cache is asked
    generates = (IndexError, "out of bounds")
    is_old = hasattr(generation_utils.GenerationMixin, "_cache_dependant_input_preparation")
    error, message = generates if is_old else ours
    with pytest.raises(error, match=message):
        generate(model, *padded(prompts(5)), 4, cache)
    assert snapshot(model) == before


@pytest.mark.parametrize("part", ["embed_tokens", "layers.1.mlp", "layers.2.self_attn.o_proj", "norm"])
def test_the_model_is_left_as_it_was_after_an_error(part: str) -> None:
    model, _ = pair("llama")
    plain = generate(model, *padded(prompts(30)), 6)
    cache = InertiaCache(model, RULE)
    talk = Talk(model, cache)
    first = talk.say(prompts(30), 6)
    before = snapshot(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    hook = model.model.get_submodule(part).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        talk.say(prompts(8), 6)
    hook.remove()
    assert snapshot(model) == before
    if part == "layers.1.mlp":  # in the middle of what concerns the cache
        with pytest.raises(ValueError, match=r"was broken off. Call the cache's reset\(\)"):
            talk.say(prompts(8), 6)
    assert snapshot(model) == before
    assert generate(model, *padded(prompts(30)), 6) == plain
    cache.reset()
    assert generate(model, *padded(prompts(30)), 6, cache) == first


def test_an_interrupt_between_k_and_attention_does_no_harm() -> None:
    model, _ = pair("llama")
    plain = generate(model, *padded(prompts(30)), 6)
    expected = generate(model, *padded(prompts(30)), 6, InertiaCache(model, RULE))
    broken = InertiaCache(model, RULE)
    k_BGTD = torch.zeros(1, 2, 3, 16)
    broken.update(k_BGTD, k_BGTD, 0)
    assert generate(model, *padded(prompts(30)), 6) == plain
    assert generate(model, *padded(prompts(30)), 6, InertiaCache(model, RULE)) == expected


def test_no_mask_of_queries_and_keys_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair("llama")
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", lambda **_: pytest.fail("a mask"))
    generate(model, *padded(prompts(30, 20)), 4, InertiaCache(model, RULE))


CALLS: dict[str, tuple[Callable[[Any, InertiaCache], Any], str]] = {
    "beams": (lambda m, c: generate(m, *padded(prompts(30)), 4, c, num_beams=2), "beams cannot share"),
    "assisted": (
        lambda m, c: generate(m, *padded(prompts(30)), 4, c, prompt_lookup_num_tokens=2),
        "cannot go back, as assisted decoding",
    ),
    "another cache beside ours": (
        lambda m, c: generate(m, *padded(prompts(30)), 4, c, cache_implementation="static"),
        "use only one of the two",
    ),
    "another model": (
        lambda m, c: generate(other("phi3"), *padded(prompts(30)), 4, c),
        "made for another model|is not the one that this cache was made for",
    ),
    "crop": (lambda m, c: c.crop(-1), "what it evicted is gone"),
    "repeat": (lambda m, c: c.batch_repeat_interleave(2), "cannot be repeated"),
    "select": (lambda m, c: c.batch_select_indices(torch.tensor([0])), "cannot be selected"),
    "weights": (
        lambda m, c: generate(
            m, *padded(prompts(30)), 4, c, output_attentions=True, return_dict_in_generate=True
        ),
        "leave out output_attentions",
    ),
    "right padding": (
        lambda m, c: generate(m, *(x.flip(1) for x in padded(prompts(30, 20))), 4, c),
        "pad prompts on the left",
    ),
    "4D mask": (
        torch.no_grad()(
            lambda m, c: m(
                torch.ones(1, 5, dtype=torch.int64), attention_mask=torch.ones(1, 1, 5, 5), past_key_values=c
            )
        ),
        "take a mask of its own: give a 2D one",
    ),
    "gradients": (lambda m, c: m(torch.ones(1, 5, dtype=torch.int64), past_key_values=c), "cannot train"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_cannot_be_right(call: str) -> None:
    model, _ = pair("llama")
    (run, message), before = CALLS[call], model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        run(model, InertiaCache(model, RULE))
    assert (model.config.to_dict(), model.config._attn_implementation) == (before, "sdpa")


def test_generate_says_that_it_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair("llama")
    batch, said = padded(prompts(30, 20)), []
    monkeypatch.setattr(generation_utils.logger, "warning_once", lambda text, *_: said.append(text))
    tokens = generate(model, *batch, 4, InertiaCache(model, RULE), compile_config=CompileConfig())
    assert tokens == generate(model, *batch, 4, InertiaCache(model, RULE))
    assert any("Compilation will be skipped" in text for text in said)


def test_training() -> None:
    model, _ = pair("llama")
    model.train()
    try:
        with pytest.raises(ValueError, match="cannot train"), torch.no_grad():
            model(torch.ones(1, 5, dtype=torch.int64), past_key_values=InertiaCache(model, RULE))
    finally:
        model.eval()


def test_further_turns_that_do_not_fit_leave_the_conversation_as_it_was() -> None:
    model, _ = pair("llama")
    rows, turn = prompts(30, 20), prompts(8, 8, seed=5)
    expected = Talk(model, InertiaCache(model, RULE))
    expected.say(rows, 6)
    talk = Talk(model, InertiaCache(model, RULE))
    talk.say(rows, 6)
    ids_BS, mask_BS = talk.ids_BS, talk.mask_BS

    talk.ids_BS, talk.mask_BS = ids_BS[:1], mask_BS[:1]
    with pytest.raises(ValueError, match="1 rows for a cache of 2"):
        talk.say(turn[:1], 6)
    for change in ((1, 3, 1), (0, 5, 0)):  # padding turns real; a token in the middle turns padding
        talk.ids_BS, talk.mask_BS = ids_BS, mask_BS.clone()
        talk.mask_BS[change[0], change[1]] = change[2]
        with pytest.raises(ValueError, match="is not that of the former turns"):
            talk.say(turn, 6)
    talk.ids_BS, talk.mask_BS = ids_BS, mask_BS
    assert talk.say(turn, 6) == expected.say(turn, 6)


def test_rules_that_need_more_than_attention() -> None:
    model, _ = pair("llama")
    for rule, message in (
        (policy("rehearsed"), "draft=64 goes on with the model by itself: use Decoder"),
        (policy("kvzip"), "scorer='reconstruction' gives the prompt to the model once more: use Decoder"),
        (policy("adakv_ea"), "scorer='expected_attention' undoes rotations"),
        (None, "takes an EvictionConfig"),
    ):
        with pytest.raises(ValueError, match=message):
            InertiaCache(model, rule)  # type: ignore[arg-type]


def meta(config: Any, auto: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return auto.from_config(config)


def test_models_that_cannot_work_so() -> None:
    t5 = AutoConfig.for_model("t5", vocab_size=50, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
    bloom = AutoConfig.for_model("bloom", vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
    lfm2 = other_config("lfm2", layer_types=["conv", "full_attention"] * 2)
    for model, message in (
        (meta(t5, AutoModelForSeq2SeqLM), "is an encoder and a decoder"),
        ("llama", "str is no model of transformers"),
        (meta(bloom), "does not use AttentionInterface"),
        (meta(lfm2), "layer 0 of Lfm2ForCausalLM is no attention"),
    ):
        with pytest.raises(ValueError, match=message):
            InertiaCache(model, RULE)


def test_masks_that_are_not_causal() -> None:
    model = other("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="cannot look ahead"):
        generate(model, *padded(prompts(30)), 4, InertiaCache(model, RULE))
    assert model.config._attn_implementation == "eager"


def test_our_attention_without_our_cache() -> None:
    model, _ = pair("llama")
    model.set_attn_implementation("inertiakv")
    try:
        with pytest.raises(ValueError, match="is set by InertiaCache alone"):
            generate(model, *padded(prompts(30)), 4)
        with pytest.raises(ValueError, match="set 'sdpa'"):
            InertiaCache(model, RULE)
    finally:
        model.set_attn_implementation("sdpa")
