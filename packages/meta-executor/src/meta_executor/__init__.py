"""Disaggregated LLM serving over MPI ranks, with KV moved by NIXL.

Rooms, each importing only what stands below it:

- ``cli``: commands and their help
- ``bench``: load, matched comparison, report
- ``front``: the OpenAI service
- ``instance``: launcher, guards, rank 0's API, the proxy, a rank's entry
- ``executor``: loop, scheduler, ownership, transceiver
- ``engine``: models, weights, tokenizer, sampling, the KV pool
- ``evidence``: records of what happened, and their verification
- ``discovery``: where instances register and the front finds them
- ``config``: what a service is configured to be
"""

from meta_executor.__about__ import __version__

__all__ = ["__version__"]
