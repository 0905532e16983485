"""Files that end too early: each one that is read gives one ValueError that names it, wherever it is cut."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from compile_tests.evals.results import make_folder, make_records
from compile_tests.models.test_checkpoint import shard
from compile_tests.tiny import decoder_for, random_prompt, tiny_model
from compile_tests.tiny_chat import tiny_chat
from inertiakv import EvictionConfig
from inertiakv.evals.records import read_meta, read_records
from inertiakv.models import load_checkpoint, load_model, parse_config
from inertiakv.models.checkpoint import INDEX, SINGLE
from inertiakv.models.hub import load_tokenizer
from inertiakv.scoring.learned import LearnedScorer, load_scorer
from inertiakv.scripts.benchmarking import results
from inertiakv.scripts.planning import check

MODEL = tiny_model(11)
PLACES = 25
BENCHMARKS = Path(check.FOLDER)


def cuts(content: bytes, places: int = PLACES) -> Iterator[int]:
    """Multiples of a hundred bytes over the whole length, and the file's very ends."""
    step = max(100, len(content) // places // 100 * 100)
    return iter(sorted({0, 1, *range(step, len(content), step), len(content) - 2}))


def assert_named(file: Path, read: Callable[[], Any], places: int = PLACES) -> None:
    """Reading fails by a ValueError that names the file, wherever it is cut."""
    read()
    content = file.read_bytes()
    for size in cuts(content, places):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=file.name) as caught:
            read()
        assert type(caught.value) is ValueError, f"{size} bytes: {caught.value!r}"
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", SINGLE, INDEX])
def test_checkpoints(tmp_path: Path, name: str) -> None:
    folder = tiny_chat(tmp_path)
    if name == INDEX:
        shard(folder)
    assert_named(folder / name, lambda: load_checkpoint(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(tmp_path: Path, name: str) -> None:
    folder = tiny_chat(tmp_path)
    assert_named(folder / name, lambda: load_tokenizer(folder))
    (folder / name).write_text("{}" if name == "tokenizer.json" else '{"added_tokens_decoder": 5}')
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_model(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": 5},
        {"layer_types": 5},
        {"rms_norm_eps": []},
        {"model_type": []},
        {"rope_scaling": {"rope_type": ["yarn"]}},
        {"rope_scaling": 5},
        {"dtype": 5},
        {"eos_token_id": {}},
        {"max_position_embeddings": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ],
    ids=str,
)
def test_configs_with_values_of_other_types(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tiny_chat(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_checkpoint(folder)
    assert type(caught.value) is ValueError
    with pytest.raises(ValueError, match=r".") as caught:
        parse_config(config | change)
    assert type(caught.value) is ValueError


def test_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from compile_tests.models import test_convert
    from inertiakv.models.convert import convert_gguf

    file, _ = test_convert.make(tmp_path, "llama")
    content = file.read_bytes()
    header = content.index(b"token_embd")
    for size in [*cuts(content, 8), *range(100, header, max(100, header // 20))]:
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model\.gguf") as caught:
            convert_gguf(file, tmp_path / "out")
        assert type(caught.value) is ValueError, f"{size} bytes: {caught.value!r}"
        assert not (tmp_path / "out").exists()


def test_gguf_without_an_architecture(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from inertiakv.models.convert import convert_gguf

    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    del writer.kv_data[0]["general.architecture"]
    writer.add_name("tiny")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"a\.gguf.*general\.architecture is missing"):
        convert_gguf(file, tmp_path / "out")


def test_saved_conversations(tmp_path: Path) -> None:
    decoder, file = decoder_for(MODEL, EvictionConfig(budget=20)), tmp_path / "saved.safetensors"
    decoder.generate(random_prompt(50), 4)
    decoder.save(file)
    assert_named(file, lambda: decoder.load(file))
    state = {"format": "inertiakv conversation 3", "state": "{"}
    save_file({"k": next(MODEL.parameters()).detach()[:1].clone()}, file, state)
    with pytest.raises(ValueError, match=r"saved\.safetensors is damaged"):
        decoder.load(file)


def test_learned_scorers(tmp_path: Path) -> None:
    file, sizes = tmp_path / "scorer.safetensors", MODEL.config
    scorer = LearnedScorer(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    save_file(dict(scorer.state_dict()), file)
    assert_named(file, lambda: load_scorer(file, sizes))


def test_records(tmp_path: Path) -> None:
    """A line that was not written to its end is no record; one that is cut within the file is an error."""
    folder = make_folder(tmp_path / "run", list(make_records(["ruler:vt"], 1024, ["full"], lambda *_: 1.0)))
    file, meta = next(folder.glob("records*.jsonl")), folder / "run_meta.json"
    content, whole = file.read_bytes(), read_records(folder)
    for size in cuts(content):
        file.write_bytes(content[:size])
        assert read_records(folder) == whole[: content[:size].count(b"\n")]
        if not content[:size].endswith(b"\n") and size:
            file.write_bytes(content[:size] + b"\n")
            with pytest.raises(ValueError, match=rf"{file.name}, line \d+ is no record"):
                read_records(folder)
    assert_named(meta, lambda: read_meta(folder))


def test_results_of_benchmarks(tmp_path: Path) -> None:
    source = next(file for file in sorted(BENCHMARKS.glob("*.json")) if check.measured([file]))
    file = tmp_path / "results.json"
    file.write_bytes(source.read_bytes())
    assert_named(file, lambda: results.read(file))
    assert_named(file, lambda: check.measured([file]), places=5)
    whole = results.read(file)
    for broken in (
        {"contenders": 5},
        {"contenders": [{}]},
        {"machine": {}},
        {"contenders": [whole["contenders"][0] | {"ms_per_step": 5}]},
    ):
        file.write_text(json.dumps(whole | broken))
        with pytest.raises(ValueError, match=r"results\.json is no results file"):
            check.measured([file])
    for broken in ({"contenders": 5}, {"contenders": [{}]}, {"contenders": [5]}):
        with pytest.raises(ValueError, match=r"results\.json is no results file"):
            results.merge(whole, whole | broken, "results.json")
