"""The OpenAI service in front of the instances. No torch and no MPI.

Layout (each imports only what stands above it)::

    openai      the public wire types of requests; errors
    shapes      those of answers
    document    both as an OpenAPI document
    envelope    a request's name, and its line in the access log
    stories     what happened to the last requests
    legs        HTTP to an instance: one context leg, one generation leg, abort
    servers     which instances there are: /server_info as endpoint records, limits
    dispatch    the two legs of a request, context-first or generation-first
    answers     tokens to text: detokenising, stop strings
    checking    from a body to a call
    replies     a call's answers side by side, streaming, disconnects
    metrics     Prometheus names and their values
    app         routes, errors, drain
    runner      the process: sockets, signals, readiness
"""

from meta_executor.front.app import FrontService, create_app
from meta_executor.front.runner import run_front

__all__ = ["FrontService", "create_app", "run_front"]
