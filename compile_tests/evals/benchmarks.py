"""The benchmarks of these tests, as `evals.registry` has the real ones."""

from types import SimpleNamespace

from inertiakv.evals.registry import Benchmark

ESSAYS = SimpleNamespace(name="essays of these tests", sha256="e5")

BENCHMARKS = {
    "made": Benchmark(
        "compile_tests.evals.made",
        ("lengths", "essays"),
        lambda setting: {"prompting": setting.prompting, "seed": setting.seed},
    ),
    "rows": Benchmark(
        "compile_tests.evals.rows", ("data",), lambda setting: {"prompting": setting.prompting}
    ),
}
