"""What stands between a foreign socket and our routes, the same for the front and for an instance.

bounds.py    who may have how much: connections, bytes of bodies, requests, in all and per client; pure
structure.py how deep and how long a JSON text is, before anybody decodes it; pure
access.py    who asks: API keys from a file, the run's key, and what each path wants
protocol.py  the bounds on one connection: deadlines, sizes, refusals (uvicorn and httptools)
serving.py   sockets, TLS and uvicorn's settings
"""
