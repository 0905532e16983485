"""The command `inertiakv`: one subcommand for each script, which is imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "chat": "talk to a model in the terminal, about documents of yours",
    "decode": "answer prompts while the KV cache keeps a fraction of them",
    "eval": "score policies on benchmarks: RULER, LongBench, needles, chains",
    "report": "make tables and pictures of what eval has measured",
    "reproduce": "run all comparisons of the paper, and report them",
    "bench": "measure decoding speed, beside other implementations",
    "plan": "predict what fits on a device, and how fast it decodes",
    "trace": "look into what policies keep, step by step",
    "train-scorer": "train the learned scorer on texts",
}
USAGE = "usage: inertiakv COMMAND ...\n\nCommands (`inertiakv COMMAND --help` says more):\n" + "\n".join(
    f"  {name:<14}{text}" for name, text in COMMANDS.items()
)


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in COMMANDS:
        problem = f"no command {name!r}" if name else "no command"
        print(f"error: {problem}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [f"inertiakv {name}", *rest]  # what help and errors call the program
    script = importlib.import_module(f"inertiakv.scripts.{name.replace('-', '_')}")
    code: int = script.main(rest)
    return code
