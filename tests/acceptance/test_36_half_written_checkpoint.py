"""A process killed in any phase of a checkpoint: the next start takes the last complete step."""

import signal
import subprocess
import sys

import pytest

from actors.state import CheckpointFolder, DataPosition, WritePhase, digest_of

WRITER = """
import os, signal, sys
from pathlib import Path
from actors.state import CheckpointFolder, DataPosition, Stamp, WritePhase, digest_of
folder, fatal_phase, nth = Path(sys.argv[1]), WritePhase(sys.argv[2]), int(sys.argv[3])
step = seen = 0
def on_phase(phase):
    global seen
    if step == 3 and phase is fatal_phase:
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)
checkpoints = CheckpointFolder(folder, 0, 1, keep=2, on_phase=on_phase)
for step in (1, 2, 3):
    checkpoints.save(Stamp("r", step, 0, 0, 1, digest_of({})), [DataPosition(10 * step)])
print("survived")
"""


@pytest.mark.parametrize(
    ("phase", "nth", "expected_step"),
    [
        (WritePhase.TENSORS, 1, 2),
        (WritePhase.SYNC, 1, 2),
        (WritePhase.MANIFEST, 1, 2),
        (WritePhase.SYNC, 2, 2),
        (WritePhase.RENAME, 1, 2),
        (WritePhase.PRUNE, 1, 3),
    ],
)
def test_the_last_complete_step_is_taken(tmp_path, phase, nth, expected_step):
    done = subprocess.run(
        [sys.executable, "-c", WRITER, tmp_path, phase, str(nth)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder, position = CheckpointFolder(tmp_path, 0, 1), DataPosition()
    assert folder.latest() == expected_step
    folder.load(expected_step, [position], digest_of({}))
    assert position.consumed == 10 * expected_step
