"""Prints every scalar of a folder of event files as TensorBoard itself reads them: `python read_events.py DIR`."""

import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
accumulator.Reload()
for tag in sorted(accumulator.Tags()["scalars"]):
    for event in accumulator.Scalars(tag):
        print(f"{tag}\t{event.step}\t{event.value:.9g}")
