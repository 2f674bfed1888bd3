"""Test lists, stages and reruns: run a hardware kind's tests with one word, rerun exactly the stages that are named, and
never call something green that did not run.

Layout, pure parts first:

- ``errors``: what is refused before anything runs (exit 2)
- ``words``: what the words of names and conditions mean, from ``words.yml``
- ``table``: hardware kinds and stages, from one YAML table
- ``lists``: the field's test-list format: blocks of conditions and test lines
- ``selecting``: which blocks a stage's query matches
- ``hardware``: what this machine has, probed or given; what a stage needs
- ``sharding``: duration-balanced, stable shards
- ``waivers``: tests that are known to fail, with reasons
- ``verdicts``: PASSED … NOT RUN, exit codes, which verdict wins
- ``needs``: Python modules, torch.cuda and MPI worlds, looked for before a stage starts
- ``plan``: options → which stages run which lines here
- ``junit``: pytest's result files
- ``execution``: runs a plan's stages, line by line
- ``bundle``: results as JUnit XML, JSON and Markdown, bound to the commit
- ``comment``: ``/bot …`` lines as the same options
- ``checking``: validates lists without importing tests, and against pytest's collection
- ``matrix``: the hosted CI's matrix, from the same table
- ``__main__``: the command line
"""
