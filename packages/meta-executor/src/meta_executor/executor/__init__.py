"""The executor room: what one rank does with its requests.

Layout (each imports only what stands above it here)::

    request                 a request and its answers, as every room between front and engine knows them
    ownership               a request's states as one table; one owner per request id
    messages                frames between the ranks of one instance
    scheduler               which tokens of which prompts the next step computes (pure)
    memory                  who owns which KV block of this rank
    bell                    ends a rank's wait
    liveness                how long the other ranks have been silent
    links                   point-to-point frames; over MPI in the next
    _mpi
    desk                    rank 0: where requests come in and answers go out
    admission               which of them may enter now, and which rank gets them
    work                    the way of new work to every rank
    control                 the control channel between the instances
    tiers                   direct or gathered writes
    transceiver             one per rank, the only owner of transfer state: what both roles have
    peer_watch              which peers' processes have ended
    aux_slots               the first token, beside the KV
    transceiver_context     of a context rank
    transceiver_generation  of a generation rank
    steps                   one pipeline step on one rank
    prefill                 computing prompts on one stage
    decode                  computing answers on one attention-DP rank
    loop                    one iteration of one rank, the same for both roles and every engine
    recording               what a loop did with its time, for trials
    drive                   iterations, and the waits between them
    compose                 one rank from its parts
    account                 what a rank did, as data
    testing                 two whole instances in one process

Nothing is re-exported: importing this package must not pull in MPI, NIXL or torch.
"""
