"""The executor room: what one rank does with its requests.

Layout (each file imports only what stands above it here):

    ownership      a request's states as one table; one owner per request id
    messages       frames between the ranks of one instance
    scheduler      which tokens of which sequences the next step computes (pure)
    memory         who owns which KV block of this rank
    links, work    point-to-point frames and the way new work takes to every rank
    transceiver    one per rank: the only owner of transfer state (agreement, sessions, NIXL)
    loop           one iteration of one rank, the same for both roles and every engine

Nothing is re-exported: importing this package must not pull in MPI, NIXL or torch.
"""
