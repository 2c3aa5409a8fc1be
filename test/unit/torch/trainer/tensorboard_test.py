"""Reads a TensorBoardFile with TensorBoard's own reader. Usage: tensorboard_test.py PROGRAM; ends with 77 without tensorboard."""

import subprocess
import sys
import tempfile

try:
    from tensorboard.backend.event_processing import event_accumulator
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.argv[1], folder], check=True, timeout=60)
    reader = event_accumulator.EventAccumulator(folder, size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    found = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}

expected = {
    "eval/loss": [(1, 11.0), (2, 12.0)] + [(step, 20.0 + step) for step in range(3, 301)],
    "rate": [(1, 0.5), (2, 0.5)],
}
if found != expected:
    sys.exit(f"TensorBoard reads {found}, expected {expected}")
