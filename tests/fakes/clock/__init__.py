"""A wall clock that can be stepped under a running process: a library that shifts CLOCK_REALTIME."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.nvml.build import compiler

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
    char text[32] = {0};
    const char *path = getenv("FAKE_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    return n > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(clock, at);
    if (rc == 0 && clock == CLOCK_REALTIME) at->tv_sec += offset_s();
    return rc;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class FakeClock:
    """`env()` for the process; `set_s` shifts its wall clock from the next look on."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._offset = directory / "offset"
        self._library = directory / "fake-clock.so"
        source = directory / "clock.c"
        source.write_text(_SOURCE)
        command = [*compiler(), "-O1", "-shared", "-fPIC", str(source), "-o", str(self._library), "-ldl"]
        subprocess.run(command, check=True)
        self.set_s(0)

    def set_s(self, offset_s: int) -> None:
        fresh = self._offset.with_suffix(f".{os.getpid()}")
        fresh.write_text(f"{offset_s}\n")
        fresh.rename(self._offset)

    def env(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "FAKE_CLOCK": str(self._offset)}

    def shown_s(self) -> float:
        """What a process sees."""
        done = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env={**os.environ, **self.env()}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return float(done.stdout)
