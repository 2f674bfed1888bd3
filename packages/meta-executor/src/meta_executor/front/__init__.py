"""The OpenAI service in front of the instances. No torch and no MPI.

Layout (each imports only what stands above it)::

    openai          the public wire types of requests; errors
    shapes          those of answers
    document        both as an OpenAPI document
    envelope        a request's name, and its line in the access log
    stories         what happened to the last requests
    metrics         Prometheus names and their values
    tenants         what keeps clients apart
    answers         tokens to text: detokenising, stop strings
    leg             one leg: what it brings, how it fails
    http_legs       legs over HTTP, and what is asked of every instance
    stream_legs     legs over an instance's one stream
    legs            which of the two an instance has
    wellness        which instances say that they can serve, asked again and again
    routers         which instance of a role gets a leg
    servers         which instances there are: /server_info as endpoint records, limits
    choices         why each leg went where it went
    live            what happens now, for a person who watches
    order           the order of context legs, for trials
    dispatch        the legs of a request: context-first, generation-first, generation alone
    checking        from a body to a call
    replies         a call's answers side by side, streaming, disconnects
    app             routes, errors, drain
    runner          the process: sockets, signals, readiness
"""

from meta_executor.front.app import FrontService, create_app
from meta_executor.front.runner import run_front

__all__ = ["FrontService", "create_app", "run_front"]
