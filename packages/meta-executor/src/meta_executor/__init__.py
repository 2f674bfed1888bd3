"""Disaggregated LLM serving over MPI ranks, with KV moved by NIXL.

Rooms, each importing only what stands below it::

    cli             commands and their help
    bench           load on a service, and what came of it
    observe         why requests went where they did, what a service does now
    preflight       what can be known to be wrong before anything starts
    rank            one rank of an instance as a process
    front           the OpenAI service
    api             an instance's door, on rank 0
    executor        what a rank does with its requests: loop, states, transfers
    recent          the last few of something, for any thread
    supervise       launcher, guards, the run's folder
    listener        what stands between a foreign socket and our routes
    engine          models, weights, tokenizer, sampling, the KV pool
    evidence        what the ranks of a run left behind, and what it proves
    discovery       where instances register and the front finds them
    mpi_launcher    how an MPI world is started here
    config          what a service is configured to be
    reasons         why a value is refused, in plain words
    private_files   files and folders that are this user's alone
    addresses       where an instance listens, and how it is announced
    wire            words between the front and an instance over HTTP
"""

from meta_executor.__about__ import __version__

__all__ = ["__version__"]
