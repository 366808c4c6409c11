"""The limiter's memory side, on the stand-in driver: every way to take memory, by every way to find it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from edgeagent.isolation.limiter import files
from tests.fakes.cuda import Box, Line, compiler, finish, go_on, read_until, tools

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

OOM = 2
HOWS = ("linked", "dlsym", "default", "proc1", "proc2", "proc2ptsz")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, tools())


def answers(lines: list[Line]) -> str:
    """Compact: `alloc` for success, `alloc!2` for a refusal, `info=FREE/TOTAL` for what is told."""
    words = []
    for line in lines:
        word = line.name if line.rc == 0 else f"{line.name}!{line.rc}"
        if line.values and line.rc == 0:
            word += "=" + "/".join(f"{v:g}" for v in line.values)
        words.append(word)
    return " ".join(words)


@pytest.mark.parametrize("private", [False, True], ids=["exported", "private-pointers"])
@pytest.mark.parametrize("how", HOWS)
def test_the_limit_holds_on_every_way_to_the_driver(box: Box, how: str, private: bool) -> None:
    """What does not fit is answered 2, what is told is the limit, and freeing makes room again."""
    environment = {"FAKE_CUDA_PRIVATE_POINTERS": "1"} if private else {}
    lines = box.limit(1024).run(
        how, "init", "ctx", *["alloc:256"] * 5, "info", "total", "free:0", "async:256", "async:1", "truth",
        **environment,
    )  # fmt: skip
    assert answers(lines) == (
        "init ctx alloc alloc alloc alloc alloc!2 info=0/1024 total=1024 free async async!2 truth=1024"
    )


SCENARIOS = {
    "managed": ("managed:600 managed:600 free:0 managed:600", "managed managed!2 free managed"),
    # The fake's pitch is 1,024 bytes, so rows of 1,000 cost 1,024.
    "pitch": ("pitch:1000:1048576 alloc:1 free:0 alloc:1024", "pitch alloc!2 free alloc"),
    "pitch of more than 64 bits": ("pitch:18446744073709551000:2 info", "pitch!2 info=1024/1024"),
    "all there is": ("bytes:18446744073709551615 info", "bytes!2 info=1024/1024"),
    "zero is the driver's to refuse": ("bytes:0 info", "bytes!1 info=1024/1024"),
    "a byte costs what the driver takes": ("bytes:1 info", "bytes info=1024/1024"),
    "freeing what is not ours": ("badfree info", "badfree!1 info=1024/1024"),
    "before CUDA 3.2": ("ancient", "ancient!2"),
    "after the CUDA we know": ("future", "future!2"),
    "pool": ("stream async:600 async:600 freeasync:0 sync async:1000", "stream async async!2 freeasync sync async"),
    "pool, per-thread stream": (
        "asyncptsz:600 asyncptsz:600 freeasync:0 sync info",
        "asyncptsz asyncptsz!2 freeasync sync info=1024/1024",
    ),
    "a pool keeps until a wait": (
        "stream async:600 freeasync:0 alloc:600 sync alloc:600",
        "stream async freeasync alloc!2 sync alloc",
    ),
    "a pool told to keep is charged until it is trimmed": (
        ("stream pool:1 poolkeep:0 frompool:0:600 freeasync:1 sync info alloc:600 frompool:0:600 freeasync:2 "
        "pooltrim:0 info"),
        ("stream pool poolkeep frompool freeasync sync info=424/1024 alloc!2 frompool freeasync "
        "pooltrim info=1024/1024"),
    ),
    "a destroyed pool is charged while its memory lives": (
        "stream pool:1 frompool:0:600 pooldestroy:0 info freeasync:1 sync info",
        "stream pool frompool pooldestroy info=424/1024 freeasync sync info=1024/1024",
    ),
    "a pool in host memory is free on a card": ("stream pool:2 frompool:0:4000 info", "stream pool frompool info=1024/1024"),
    "a pool's memory freed without its stream": ("async:600 free:0 info", "async free info=1024/1024"),
    "physical memory": ("create:600 create:600 release:0 create:600", "create create!2 release create"),
    "physical memory lives while it is mapped": (
        "create:600 map:0:600 release:0 create:600 unmap:1:600 create:600",
        "create map release create!2 unmap create",
    ),
    "physical memory lives while a second handle does": (
        "create:600 map:0:600 retain:1 release:0 release:2 info unmap:1:600 info",
        "create map retain release release info=424/1024 unmap info=1024/1024",
    ),
    "a handle found again through its mapping": (
        "create:600 map:0:600 release:0 retain:1 unmap:1:600 info release:2 info",
        "create map release retain unmap info=424/1024 release info=1024/1024",
    ),
    "one range of two mappings": (
        "create:100 create:100 map:0:100 mapbeside:1:100:2 release:0 release:1 info unmap:2:200 info",
        "create create map mapbeside release release info=824/1024 unmap info=1024/1024",
    ),
    "physical memory of the host": ("create:4000:2 info", "create info=1024/1024"),
    "imported handles are charged when mapped": (
        "import map:0:600 import map:2:600 release:0 unmap:1:600 map:2:600",
        "import map import map!2 release unmap map",
    ),
    "external memory": (
        "external:600 external:600 externalfree:0 external:600",
        "external external!2 externalfree external",
    ),
    "arrays": (
        "array:8192:8192 array3:8192:8192:4 array:16384:12288 array:16:16 arrayfree:0 array:8192:8192",
        "array array3!2 array array!2 arrayfree array",
    ),
    "mipmaps": ("mipmap:8192:8192:14 info mipmapfree:0 info", "mipmap info=682.67/1024 mipmapfree info=1024/1024"),
    "host memory is free beside a card": ("host:4000 allochost:4000 register:4000 info",
                                          "host allochost register info=1024/1024"),
    "graph": (
        "graph galloc:0:300 galloc:0:300:1 galloc:0:300:2 galloc:0:300:3 info gdestroy:0 info",
        "graph galloc galloc galloc galloc!2 info=124/1024 gdestroy info=1024/1024",
    ),
    "a graph pays for the most it holds at once": (
        "graph galloc:0:600 gfree:0:1 galloc:0:600 gfree:0:2 galloc:0:600 info",
        "graph galloc gfree galloc gfree galloc info=424/1024",
    ),
    "a graph pays until its instances and its pool are gone": (
        ("stream graph galloc:0:600 inst:0 inst:0:1 inst:0:2 gdestroy:0 glaunch:2 xdestroy:2 xdestroy:3 info "
        "xdestroy:4 info gtrim info"),
        ("stream graph galloc inst inst inst gdestroy glaunch xdestroy xdestroy info=424/1024 "
        "xdestroy info=424/1024 gtrim info=1024/1024"),
    ),
    "captured allocations": (
        "stream capture:0 async:600 freeasync:0 async:600 async:600 endcapture inst:2 glaunch:3 info",
        "stream capture async freeasync async async!2 endcapture inst glaunch info=424/1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("commands", "expected"), SCENARIOS.values(), ids=SCENARIOS.keys())
def test_every_way_to_take_memory(box: Box, commands: str, expected: str) -> None:
    lines = box.limit(1024).run("dlsym", "init", "ctx", *commands.split())
    assert answers(lines) == f"init ctx {expected}"


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ("host:600 allochost:600 hostfree:0 allochost:600", "host allochost!2 hostfree allochost"),
        ("register:600 host:600 unregister host:600", "register host!2 unregister host"),
        ("create:600:2 pool:2 frompool:1:600", "create pool frompool!2"),
    ],
    ids=["pinned", "registered", "host pools and handles"],
)
def test_host_memory_counts_where_the_gpu_shares_it(box: Box, commands: str, expected: str) -> None:
    lines = box.limit(1024, unified=True).run("dlsym", "init", "ctx", *commands.split())
    assert answers(lines) == f"init ctx {expected}"


def test_a_graph_that_takes_more_than_its_order_shows_is_charged_after_its_launch(box: Box) -> None:
    commands = "init ctx stream graph galloc:0:300 inst:0 glaunch:2 info alloc:600"
    lines = box.limit(1024).run("dlsym", *commands.split(), FAKE_CUDA_GRAPH_FACTOR="2")
    assert answers(lines[-2:]) == "info=424/1024 alloc!2"


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ("ctx alloc:600 array:4096:4096 external:100 ctxdestroy ctx info", "ctx alloc array external ctxdestroy ctx info=1024/1024"),
        ("ctx create:600 async:100 ctxdestroy ctx info", "ctx create async ctxdestroy ctx info=324/1024"),
        ("primary alloc:600 async:100 reset primary info", "primary alloc async reset primary info=1024/1024"),
        ("primary primary alloc:600 release1 info release1 primary info", "primary primary alloc release1 info=424/1024 release1 primary info=1024/1024"),
        ("primary graph galloc:0:600 reset primary info", "primary graph galloc reset primary info=1024/1024"),
    ],
    ids=["what is the context's", "what is the device's", "reset", "the last release", "graphs"],
)  # fmt: skip
def test_a_context_takes_its_memory_with_it(box: Box, commands: str, expected: str) -> None:
    assert answers(box.limit(1024).run("dlsym", "init", *commands.split())) == f"init {expected}"


def test_contexts_that_come_and_go_under_a_cap(box: Box) -> None:
    """The limiter's own events are a context's too: none is used after its end."""
    one = ("ctx", "stream", "kernel:100:5", "sync", "kernel:100:5", "ctxdestroy")
    lines = box.limit(1024, cores_pct=50).run("dlsym", "init", *one * 5)
    assert {line.rc for line in lines} == {0}


def test_the_overhead_is_charged_once_and_before_the_context(box: Box) -> None:
    box.limit(1024, overhead_mib=300)
    assert answers(box.run("dlsym", "init", "ctx", "primary", "info")) == "init ctx primary info=724/1024"
    said = "edgeagent: GPU refused to this process: ./state: the limit is reached\n"
    lines = box.limit(200, overhead_mib=300).run("dlsym", "init", "primary", "ctx", stderr=said)
    assert answers(lines) == "init primary!2 ctx!2"


def test_the_smaller_of_limit_and_gpu_is_told(box: Box) -> None:
    lines = box.limit(100_000).run("dlsym", "init", "ctx", "info", "total")
    assert answers(lines[2:]) == "info=8192/8192 total=8192"


def test_what_the_driver_refuses_is_not_charged(box: Box) -> None:
    lines = box.limit(100_000).run(
        "dlsym", "init", "ctx", "stream", "alloc:9000", "async:9000", "create:9000", "array:65536:65536",
        "external:9000", "graph", "info",
    )  # fmt: skip
    assert [line.rc for line in lines] == [0, 0, 0, 2, 2, 2, 2, 2, 0, 0]
    assert box.state().total_bytes == 0 or lines[-1].values[0] == 8192


def test_processes_are_counted_together_and_the_killed_are_not(box: Box) -> None:
    """The dead process is left a zombie: its memory counts as free all the same."""
    box.limit(1024)
    first = box.start("dlsym", "init", "ctx", "alloc:700", "wait")
    read_until(first, "ready")
    lines = box.run("dlsym", "init", "ctx", "alloc:700", "alloc:300", "info")
    assert answers(lines) == "init ctx alloc!2 alloc info=24/1024"
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    lines = box.run("dlsym", "init", "ctx", "alloc:700", "info")
    assert answers(lines) == "init ctx alloc info=324/1024"
    assert box.state().reclaimed >= 1
    finish(first)


def test_the_state_file_says_who_has_what(box: Box) -> None:
    process = box.limit(1024, overhead_mib=24).start(
        "dlsym", "init", "ctx", "alloc:100", "alloc:2000", "wait"
    )
    read_until(process, "ready")
    state = box.state()
    (slot,) = state.slots
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    namespace = os.stat(f"/proc/{process.pid}/ns/pid").st_ino
    assert (slot.pid, slot.started_ticks, slot.pid_ns) == (process.pid, started, namespace & 0xFFFFFFFF)
    assert (slot.bytes, slot.refused) == (124 * files.MIB, 1)
    assert (state.total_bytes, state.refused) == (124 * files.MIB, 1)
    assert state.last_refused_bytes == 2000 * files.MIB
    finish(process)


def test_sixteen_processes_race_for_the_last_byte(box: Box) -> None:
    """Together they get exactly what fits: 64 pieces of 16 MiB, not one more or less."""
    box.limit(1024)
    racers = [box.start("dlsym", "init", "ctx", "wait", "fill:16", "wait") for _ in range(16)]
    for racer in racers:
        read_until(racer, "ready")
    for racer in racers:
        go_on(racer)
    got = [line for racer in racers for line in read_until(racer, "ready") if line.name == "fill"]
    for racer in racers:
        finish(racer)
    assert {line.rc for line in got} == {OOM}
    assert sum(line.values[0] for line in got) == 64


def test_a_thousand_processes_in_one_container(box: Box) -> None:
    lines = box.limit(980).run("dlsym", "family:1000:1")
    assert lines == [Line("family", 0, (980.0,))]
    # All are gone; one more finds their slots and their memory.
    assert answers(box.run("dlsym", "init", "ctx", "alloc:980")) == "init ctx alloc"


def test_a_fork_starts_with_nothing(box: Box) -> None:
    """The child has a slot of its own, gone when it ends; the parent starts over beside it."""
    lines = box.limit(1024).run(
        "dlsym", "twins", "init", "ctx", "alloc:600", "alloc:600", "free:0", "alloc:600"
    )
    one = "init ctx alloc alloc!2 free alloc"
    assert answers(lines) == f"twins {one} twins {one}"


def test_a_child_of_a_process_that_uses_cuda_does_not_free_for_it(box: Box) -> None:
    """The driver forbids CUDA in such a child; whatever it tries, the parent keeps its charge."""
    lines = box.limit(1024).run("dlsym", "init", "ctx", "alloc:600", "twins", "free:0", "alloc:600")
    assert answers(lines) == "init ctx alloc twins free alloc!2 twins free alloc"


def test_exec_gives_back_what_the_program_before_held(box: Box) -> None:
    lines = box.limit(1024).run("dlsym", "init", "ctx", "alloc:1000", "exec", "init", "ctx", "alloc:1000")
    assert answers(lines) == "init ctx alloc init ctx alloc"


def test_threads_balance(box: Box) -> None:
    lines = box.limit(1024).run("dlsym", "init", "ctx", "churn:8:2000:4096", "info")
    assert answers(lines) == "init ctx churn=0 info=1024/1024"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_users_of_all_kinds_share_one_account(box: Box) -> None:
    box.limit(1024)
    held = box.start("dlsym", "init", "ctx", "alloc:600", "wait")
    read_until(held, "ready")
    lines = box.run("dlsym", "user:1001", "init", "ctx", "alloc:600", "alloc:400")
    assert answers(lines) == "user init ctx alloc!2 alloc"
    finish(held)


# ---- closed where it cannot count ----------------------------------------------------------------


def damage(box: Box, what: str) -> None:
    limits, state = box.directory / "limits", box.directory / "state"
    good = limits.read_text()
    match what:
        case "no limits":
            limits.unlink()
        case "empty limits":
            limits.write_text("")
        case "truncated limits":
            limits.write_text(good[: len(good) // 2])
        case "no end":
            limits.write_text(good.replace("end\n", ""))
        case "negative":
            limits.write_text(re.sub(r"memory_bytes \d+", "memory_bytes -1", good))
        case "huge":
            limits.write_text(re.sub(r"memory_bytes \d+", "memory_bytes " + "9" * 40, good))
        case "no cores":
            limits.write_text(re.sub(r"cores_pct \d+", "cores_pct 0", good))
        case "unknown key":
            limits.write_text(good.replace("end\n", "more 1\nend\n"))
        case "other limits version":
            limits.write_text(good.replace("edgeagent-limits 1", "edgeagent-limits 2"))
        case "no state":
            state.unlink()
        case "state is a directory":
            state.unlink()
            state.mkdir()
        case "short state":
            os.truncate(state, 4096)
        case "empty state":
            os.truncate(state, 0)
        case "other state version":
            data = bytearray(state.read_bytes())
            data[8] = 2
            state.write_bytes(data)
        case "not a state":
            state.write_bytes(b"\xff" * files.STATE_BYTES)
        case _:
            raise AssertionError(what)


DAMAGES = {
    "no limits": "limits: it cannot be opened",
    "empty limits": "limits: it is empty",
    "truncated limits": "limits: it does not end in a whole line",
    "no end": "limits: its end is missing",
    "negative": "limits: it has a value that is no number within bounds",
    "huge": "limits: it has a value that is no number within bounds",
    "no cores": "limits: it has a value that is no number within bounds",
    "unknown key": "limits: it has an unknown key",
    "other limits version": "limits: it is of another version",
    "no state": "state: it cannot be opened",
    "state is a directory": "state: it cannot be opened",
    "short state": "state: it has the wrong size",
    "empty state": "state: it has the wrong size",
    "other state version": "state: it is of another version",
    "not a state": "state: it is of another version",
}

EVERYTHING = (
    "ctx", "primary", "alloc:1", "managed:1", "pitch:1:1", "async:1", "create:1", "import", "external:1",
    "array:1:1", "array3:1:1:1", "mipmap:1:1:1", "host:1", "register:1", "pool:1", "info", "kernel:1", "kernelex:1",
    "cooperative:1",
)  # fmt: skip


@pytest.mark.parametrize(("what", "said"), DAMAGES.items(), ids=DAMAGES.keys())
def test_it_fails_closed(box: Box, what: str, said: str) -> None:
    """Every allocation, context and launch is answered 2, and stderr says why in one line."""
    damage(box.limit(1024), what)
    lines = box.run(
        "dlsym", "init", *EVERYTHING, stderr=f"edgeagent: GPU refused to this process: ./{said}\n"
    )
    assert lines[0].rc == 0
    assert {line.name: line.rc for line in lines[1:]} == {c.partition(":")[0]: OOM for c in EVERYTHING}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_state_file_of_another_user_is_refused_to_this_one(box: Box) -> None:
    box.limit(1024)
    (box.directory / "state").chmod(0o600)
    said = "edgeagent: GPU refused to this process: ./state: it may not be written by this user\n"
    lines = box.run("dlsym", "user:1001", "init", "ctx", "alloc:1", stderr=said)
    assert answers(lines) == "user init ctx!2 alloc!2"


def test_a_full_table_of_living_processes_refuses_one_more(box: Box) -> None:
    """Slots of another PID namespace cannot be judged, so they are not taken away."""
    box.limit(1024)
    path = box.directory / "state"
    data = bytearray(path.read_bytes())
    data[20:24] = files.STATE_SLOTS.to_bytes(4, "little")
    for index in range(files.STATE_SLOTS):
        at = 12288 + index * 64
        data[at : at + 8] = (1).to_bytes(4, "little") + (77).to_bytes(4, "little")
    path.write_bytes(data)
    said = "edgeagent: GPU refused to this process: ./state: it has no free slot\n"
    assert answers(box.run("dlsym", "init", "ctx", "alloc:1", stderr=said)) == "init ctx!2 alloc!2"


def test_a_process_killed_inside_the_lock_does_not_stop_the_others(box: Box) -> None:
    """The lock names a process that is gone: the next one takes over and adds the slots up anew."""
    box.limit(1024)
    dead = subprocess.Popen(["true"])
    dead.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino & 0x1FF
    path = box.directory / "state"
    data = bytearray(path.read_bytes())
    data[16:20] = (dead.pid | namespace << 22).to_bytes(4, "little")
    data[24:32] = (1 << 40).to_bytes(8, "little")  # a total that it left half-changed
    path.write_bytes(data)
    assert answers(box.run("dlsym", "init", "ctx", "alloc:1000")) == "init ctx alloc"


def test_a_lock_that_is_never_given_back_refuses_rather_than_hangs(box: Box) -> None:
    """Its owner lives, stopped by a debugger say."""
    box.limit(1024)
    namespace = os.stat("/proc/self/ns/pid").st_ino & 0x1FF
    path = box.directory / "state"
    data = bytearray(path.read_bytes())
    data[16:20] = (os.getpid() | namespace << 22).to_bytes(4, "little")
    path.write_bytes(data)
    assert answers(box.run("dlsym", "init", "ctx")) == "init ctx!2"


# ---- leaving everybody else alone -----------------------------------------------------------------


def test_a_program_without_cuda_notices_nothing(tmp_path: Path) -> None:
    """No output, no files needed, and RTLD_NEXT still means next after the caller."""
    box = Box(tmp_path, tools())
    command = [str(box.tools.bystander)]
    without = subprocess.run(
        command, env=box.environment(preload=False), cwd=tmp_path, capture_output=True, check=True
    )
    preloaded = subprocess.run(command, env=box.environment(), cwd=tmp_path, capture_output=True, check=True)
    expected = f"{os.sysconf('SC_PAGESIZE') + 1} no-cuda printf\n".encode()
    assert (without.stdout, without.stderr) == (expected, b"")
    assert (preloaded.stdout, preloaded.stderr) == (expected, b"")


def test_a_program_whose_driver_is_missing_is_told_so(box: Box) -> None:
    done = subprocess.run(
        box.command("dlsym", "init"),
        env={**box.environment(), "LD_LIBRARY_PATH": ""},
        cwd=box.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "no driver\n", "")


def test_no_environment_variable_is_read(box: Box) -> None:
    """Neither can it (no getenv is imported), nor do its kin's variables do anything."""
    symbols = subprocess.run(
        ["nm", "-D", box.tools.limiter], capture_output=True, text=True, check=True
    ).stdout
    assert "getenv" not in symbols
    lines = box.limit(1024).run(
        "dlsym", "init", "ctx", "alloc:2000",
        CUDA_DEVICE_MEMORY_LIMIT="0", CUDA_DISABLE_CONTROL="true", LIMITER_DIR="/tmp", EDGEAGENT_LIMITER="off",
    )  # fmt: skip
    assert answers(lines) == "init ctx alloc!2"


def test_it_has_no_code_that_runs_at_start(box: Box) -> None:
    """Beside what the compiler puts into every library."""
    sections = subprocess.run(
        ["readelf", "-SW", box.tools.limiter], capture_output=True, text=True, check=True
    ).stdout
    size = re.search(r"\.init_array\s+INIT_ARRAY\s+\S+ \S+ (\S+)", sections)
    assert size is not None
    assert int(size.group(1), 16) == 8


@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_sanitizers_find_nothing(tmp_path: Path, variant: str) -> None:
    """All memory scenarios in one process, threads that allocate and launch, with and without a cap."""
    built = tools(variant)
    if built.runtime is None:
        pytest.skip(f"the compiler has no {variant} runtime")
    box = Box(tmp_path, built)
    numbered = 0
    commands = ["init", "ctx", "stream"]
    for step in ("alloc:9 free", "managed:9 free", "async:9 freeasync", "create:9 release", "array:99:99 arrayfree",
                 "mipmap:99:99:5 mipmapfree", "external:9 externalfree"):  # fmt: skip
        take, _, give = step.partition(" ")
        commands += [take, f"{give}:{numbered}"]
        numbered += 1
    commands += ["graph", f"galloc:{numbered}:9", f"inst:{numbered}", f"glaunch:{numbered + 2}",
                 f"gdestroy:{numbered}", f"xdestroy:{numbered + 2}", "alloc:5000", "future", "ancient", "info",
                 "kernel:50:3", "ctxdestroy", "ctx", "primary", "reset"]  # fmt: skip
    lines = box.limit(1024).run("dlsym", *commands)
    assert [line.name for line in lines if line.rc] == ["alloc", "future", "ancient"]
    for cores in (100, 40):
        lines = box.limit(1024, cores_pct=cores).run(
            "proc2", "init", "ctx", "churn:6:300:4096", "kernels:4:40", "info"
        )
        assert [line.rc for line in lines] == [0] * 5
        assert lines[2].values == lines[3].values == (0.0,)
        one = ("ctx", "stream", "kernel:50:3", "alloc:1", "sync", "kernel:50:3", "ctxdestroy")
        assert {line.rc for line in box.run("dlsym", "init", *one * 3)} == {0}
    damage(box.limit(1024), "truncated limits")
    assert {line.rc for line in box.run("dlsym", "init", "alloc:1", stderr=None)} == {0, OOM}
