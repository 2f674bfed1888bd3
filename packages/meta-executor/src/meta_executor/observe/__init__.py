"""Looking at a running service from outside, over its own HTTP: why requests went where they did, and what it does now.

    explain        /debug/routing as one story per request: pure, and its words
    request_trace  /debug/requests/ID as a trace for Perfetto: pure
    top            two samples of the metrics as one frame of rates and levels: pure
    client         what is asked, and its errors
    _rich          a frame as a terminal table: the only file that imports rich

Nothing here imports the engine, MPI or the executor: it runs anywhere that can reach the service.
"""

from meta_executor.observe.client import Address, ObserveError, ServiceClient
from meta_executor.observe.explain import LegStory, RequestStory, stories, text_of
from meta_executor.observe.top import Frame, InstanceRow, RankRow, Sample, frame_of

__all__ = [
    "Address",
    "Frame",
    "InstanceRow",
    "LegStory",
    "ObserveError",
    "RankRow",
    "RequestStory",
    "Sample",
    "ServiceClient",
    "frame_of",
    "stories",
    "text_of",
]
