"""Converts a GGUF file of a supported family into a folder that `load_model` takes.

python scripts/convert_gguf.py FILE OUT
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inertiakv.models.convert import convert_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file into a folder of bfloat16 safetensors.")
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the folder to make; must not exist yet")
    arguments = parser.parse_args()
    try:
        convert_gguf(arguments.file, arguments.out)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"wrote {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
