"""Which policy for what, in five lines: docs/rules.md has the same with what stands behind it."""

from __future__ import annotations

WHICH_POLICY = """\
which policy, which budget (points, and the full cache's: small models, 2k tokens of RULER, or copying):
  --policy rehearsed                     answers that matter: 81.2 of 82.5; 128 more steps before token two
  --policy rehearsed --compression 0.95  half of that cache: 69.9 of 87.2, where a tenth has 72.9
  --policy lazy4 --pool 13               no time before token two: 58.8 of 82.5
  --policy lazy4 --compression 0.5       half of the prompt stays: 75.0 of 82.5; with a tenth 40.0
  --policy rehearsed --budget 160        short prompts, long answers: 75.8 of 100.0, inertiakv 9.7
More: docs/rules.md, which policy for what.
"""
