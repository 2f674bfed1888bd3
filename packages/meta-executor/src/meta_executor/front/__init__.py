"""The OpenAI service in front of the instances. No torch and no MPI.

Layout (each imports only what stands above it)::

    openai      the public wire types: strict requests, answers as plain data
    legs        HTTP to an instance: one context leg, one generation leg, abort
    servers     which instances there are: /server_info as endpoint records, limits
    dispatch    the two legs of a request, context-first or generation-first
    answers     tokens to text: detokenising, stop strings, usage
    metrics     Prometheus names and their values
    app         routes, errors, streaming, disconnects, drain
    runner      the process: sockets, signals, readiness
"""

from meta_executor.front.app import FrontService, create_app
from meta_executor.front.runner import run_front

__all__ = ["FrontService", "create_app", "run_front"]
