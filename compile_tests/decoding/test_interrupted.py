"""What is broken off at any point, or changed between two requests, does not show in the next answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile_tests.tiny import decoder_for, random_prompts, tiny_model
from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.compiling.changes import traits

RULE = EvictionConfig(compression=0.5, refresh=2)
DRAFTED = EvictionConfig(compression=0.5, draft=3, drafts=2)
SNAPKV = policy("snapkv", compression=0.5, window=4, recent=4)
PROMPTS = random_prompts([40, 25])


class Stopped(BaseException):
    """As KeyboardInterrupt, which pytest takes for one of its own."""


class Fuse:
    """Breaks off at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stopped


def broken_off(act: Callable[[], object]) -> bool:
    """Whether it was."""
    try:
        act()
    except Stopped:
        return True
    return False


@pytest.mark.parametrize("rule", [RULE, DRAFTED, SNAPKV, None], ids=["rule", "draft", "snapkv", "full"])
def test_every_layer_of_every_pass(rule: EvictionConfig | None) -> None:
    model = tiny_model(25, dtype=torch.float32)
    expected = decoder_for(model, rule).generate(PROMPTS, 4).tokens
    decoder = decoder_for(model, rule, prefill_chunk=16)
    for calls in range(1, 100):
        hook = model.layers[calls % 2].register_forward_hook(Fuse((calls + 1) // 2))
        broken = broken_off(lambda: decoder.generate(PROMPTS, 4))
        hook.remove()
        assert decoder.generate(PROMPTS, 4).tokens == expected
        if not broken:
            return
    pytest.fail("every call was broken off")


def test_every_callback() -> None:
    model = tiny_model(25, dtype=torch.float32)
    expected = decoder_for(model, DRAFTED).generate(PROMPTS, 4).tokens
    for name in ("stop", "progress", "on_draft"):
        for calls in range(1, 100):
            fuse = Fuse(calls)
            options: dict[str, Any] = {"on_draft": fuse} if name == "on_draft" else {}
            request: dict[str, Any] = {} if options else {name: fuse}
            decoder = decoder_for(model, DRAFTED, prefill_chunk=16, **options)
            broken = broken_off(lambda d=decoder, r=request: d.generate(PROMPTS, 4, **r))  # type: ignore[misc]
            fuse.left = 0
            assert decoder.generate(PROMPTS, 4).tokens == expected
            if not broken:
                assert calls > 2
                break


def compiled_like_a_first_one(decoder: Decoder, expected: Any) -> None:
    """The next request compiles, and says so; the one after that is replayed."""
    graphs = decoder.graphs.stats
    before = (graphs.compiled, graphs.seconds)
    out = decoder.generate(PROMPTS, 6)
    assert out.tokens == expected
    assert graphs.compiled > before[0]
    assert out.stats.seconds.compile == pytest.approx(graphs.seconds - before[1])
    assert out.stats.seconds.decode < out.stats.seconds.compile
    decoder.generate(PROMPTS, 6)
    steps = [step for key, step in decoder.graphs._compiled.items() if key[0] == "decode step"]
    assert [step.replays for step in steps] == [True]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_compiled_yet")
def test_broken_off_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    model = tiny_model(25, dtype=torch.float32)
    expected = decoder_for(model, RULE).generate(PROMPTS, 6).tokens
    fuse = Fuse(1)
    decoder = decoder_for(model, RULE, compile=True, on_compile=fuse)
    assert broken_off(lambda: decoder.generate(PROMPTS, 6))
    with monkeypatch.context() as patch:
        patch.setattr(compile_fx, "compile_fx", Fuse(1))
        assert broken_off(lambda: decoder.generate(PROMPTS, 6))
    compiled_like_a_first_one(decoder, expected)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model.norm, "eps", 0.5),
    "a scale": lambda model: setattr(model.layers[1].self_attn, "scale", 0.9),
    "a hook": lambda model: model.layers[0].mlp.register_forward_hook(lambda *args: 0.5 * args[-1]),
    "a layer": lambda model: setattr(model.layers[0], "mlp", torch.nn.Identity()),
    "a forward": lambda model: setattr(model.layers[0].mlp, "forward", lambda x_BTE: x_BTE.neg()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_graphs_would_not_see(change: str) -> None:
    model = tiny_model(25, dtype=torch.float32)
    before = traits(model)
    assert traits(model) == before
    model.norm.weight.data.mul_(2)
    model.layers[1].mlp.train()
    assert traits(model) == before
    CHANGES[change](model)
    assert traits(model) != before


def test_a_model_that_was_changed_is_compiled_anew(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(25, dtype=torch.float32)
    decoder = decoder_for(model, RULE, compile=True)
    before = decoder.generate(PROMPTS, 6).tokens
    model.layers[0].input_layernorm.eps = 10.0
    expected = decoder_for(model, RULE).generate(PROMPTS, 6).tokens
    assert expected != before
    with caplog.at_level(logging.WARNING, "inertiakv"):
        assert decoder.generate(PROMPTS, 6).tokens == expected
        assert decoder.generate(PROMPTS, 6).tokens == expected
    said = [record.message for record in caplog.records if record.name == "inertiakv.compiling.graphs"]
    assert said == ["the model was changed: its decode steps are compiled anew"]
