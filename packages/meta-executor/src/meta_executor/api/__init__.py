"""An instance's door, on rank 0: requests come in, answers go out.

Layout (each imports only what stands above it)::

    endpoint    whether a request may come in now
    service     what the worker offers, by RPC or by a direct call
    batching    when submits are sent together
    proxy       the calling side of the service (the front's too)
    server      the paths of :mod:`meta_executor.wire` over HTTP
    spawned     the same server as a process of its own
"""
