"""A stand-in for systemctl: keeps units as systemd does, as far as install.sh goes, and runs the service.

Loaded units are copies: a changed file counts after daemon-reload. `start` waits for READY=1 as
Type=notify does. Every call is written down in /run/standin-systemd/calls.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STATE = Path("/run/standin-systemd")
UNITS = Path("/etc/systemd/system")
WANTS = UNITS / "multi-user.target.wants"


def unit_name(name):
    return name if name.endswith(".service") else f"{name}.service"


def pid_of(name):
    try:
        pid = int((STATE / f"{name}.pid").read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None if state == "Z" else pid


def reload_units():
    for loaded in STATE.glob("*.service"):
        source = UNITS / loaded.name
        if source.exists():
            loaded.write_bytes(source.read_bytes())
        else:
            loaded.unlink()


def loaded(name):
    path = STATE / name
    if not path.exists() and (UNITS / name).exists():
        path.write_bytes((UNITS / name).read_bytes())
    return path.read_text() if path.exists() else None


def start(name):
    if pid_of(name) is not None:
        return 0
    text = loaded(name)
    if text is None:
        if name.startswith("k3s"):
            return 0
        print(f"Failed to start {name}: Unit {name} not found.", file=sys.stderr)
        return 5
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE).group(1))
    address = str(STATE / f"{name}.notify")
    Path(address).unlink(missing_ok=True)
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(address)
    notify.settimeout(0.1)
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "NOTIFY_SOCKET": address, "LANG": "C.UTF-8"}
    extra = STATE / "environment"
    if extra.exists():
        env.update(line.split("=", 1) for line in extra.read_text().splitlines())
    Path("/run/edgeagent").mkdir(exist_ok=True)
    with open(STATE / f"{name}.log", "ab") as log:
        child = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    (STATE / f"{name}.pid").write_text(str(child.pid))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if "READY=1" in notify.recv(4096).decode():
                return 0
        except TimeoutError:
            continue
    print(f"Job for {name} failed because the control process exited with error code.", file=sys.stderr)
    return 1


def stop(name):
    pid = pid_of(name)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while pid_of(name) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        if pid_of(name) is not None:
            os.kill(pid, signal.SIGKILL)
    (STATE / f"{name}.pid").unlink(missing_ok=True)
    return 0


def main(argv):
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / "calls", "a") as f:
        f.write(" ".join(argv) + "\n")
    no_reload = "--no-reload" in argv
    words = [a for a in argv if not a.startswith("-")]
    verb, names = words[0], [unit_name(w) for w in words[1:]]
    if verb == "daemon-reload":
        reload_units()
        return 0
    if verb == "show":
        name = next(n for n in names if n != unit_name("NeedDaemonReload"))
        path, source = STATE / name, UNITS / name
        changed = path.exists() and (not source.exists() or path.read_bytes() != source.read_bytes())
        print("yes" if changed else "no")
        return 0
    name = names[0]
    if verb == "is-active":
        return 0 if pid_of(name) is not None else 3
    if verb == "is-enabled":
        return 0 if (WANTS / name).is_symlink() else 1
    if verb == "enable":
        WANTS.mkdir(parents=True, exist_ok=True)
        (WANTS / name).unlink(missing_ok=True)
        (WANTS / name).symlink_to(UNITS / name)
    elif verb == "disable":
        (WANTS / name).unlink(missing_ok=True)
    elif verb == "start":
        return start(name)
    elif verb == "stop":
        return stop(name)
    elif verb == "restart":
        stop(name)
        return start(name)
    else:
        print(f"stand-in systemctl: {verb}?", file=sys.stderr)
        return 1
    if not no_reload:
        reload_units()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
