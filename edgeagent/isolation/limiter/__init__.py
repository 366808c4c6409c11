"""The limiter: a C library preloaded into a container's processes, and the files it works with.

`limiter.h` explains the library. `files` owns the formats of what the agent mounts beside it,
`build` makes the library, `canary` tries it.
"""
