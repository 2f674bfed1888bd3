"""What stands between a foreign socket and our routes, the same for the front and for an instance.

Layout (each imports only what stands above it)::

    lingering     connections that were refused and may still read why
    bounds        who may have how much: connections, bytes of bodies, requests, in all and per client; pure
    descriptors   as many connections as the process may have descriptors
    structure     how deep and how long a JSON text is, before anybody decodes it; pure
    tls           what a listener needs for TLS, and how a process of the same run reaches it
    access        who asks: API keys from a file, the run's key, and what each path wants
    credentials   what the configuration says about who may come in
    metrics       the accounts for Prometheus
    protocol      the bounds on one connection: deadlines, sizes, refusals (uvicorn and httptools)
    entrance      accepting one by one, and a TLS connection until its handshake is over
    reading       a body: read within its bound, looked at, decoded
    serving       sockets, TLS and uvicorn's settings
"""
