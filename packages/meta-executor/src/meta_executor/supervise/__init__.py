"""A run's processes and its folder: starting worlds of ranks, watching them, ending them, leaving nothing behind.

Layout (each imports only what stands above it)::

    procfs      what /proc says of a process
    shm         segments that a dead world leaves in /dev/shm
    report      a process's word to the launcher
    guard       stands between mpiexec and a rank, and survives it
    rundir      the run's folder
    launch      starts, watches, restarts and ends the instances and the front
"""
