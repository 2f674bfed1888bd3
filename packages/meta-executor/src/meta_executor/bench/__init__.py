"""Load on a service, and what came of it: through the front as clients do, judged from the evidence files.

- ``load``: the requests and their measurements
- ``run``: starts a service, loads it, drains it, judges it
- ``report``: the figures as text and JSON
"""
