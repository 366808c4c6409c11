"""The stand-in's program: nvidia-cuda-mps-control, protocol 2 and 3, with its daemon's state in a file.

There is no process behind it: a "daemon" is the file state.json in its pipe directory, and the (empty)
file `control` that clients look for. What a program started with -d learned of its environment, every
command are kept there. As a program it is run with -I -S: only the standard library. `run` is the same
in the caller's process, for tests that do not need a process.
"""

import json
import os
import sys
import time

HELP = "unknown command"


class Answer(Exception):
    """Ends a command at once: what is printed, and the exit status."""

    def __init__(self, text, status=1):
        self.text = text
        self.status = status


class HangError(Exception):
    """The command never returns."""


def answer(text, status=1):
    raise Answer(text, status)


def load(pipe):
    try:
        with open(os.path.join(pipe, "state.json"), encoding="utf-8") as f:
            state = json.load(f)
    except FileNotFoundError:
        state = None
    if state is None or not state["alive"] or not os.path.exists(os.path.join(pipe, "control")):
        answer("Cannot find MPS control daemon process", 1)
    return state


def save(pipe, state):
    fresh = os.path.join(pipe, f".state.{os.getpid()}")
    with open(fresh, "w", encoding="utf-8") as f:
        json.dump(state, f)
    os.rename(fresh, os.path.join(pipe, "state.json"))


def start(pipe, arguments, environment, known):
    if known.get("fails"):
        answer(known["fails"], 1)
    protocol = 2
    if "-p" in arguments:
        if "3" not in known["protocols"]:
            answer("nvidia-cuda-mps-control: invalid option -- 'p'", 1)
        protocol = int(arguments[arguments.index("-p") + 1])
    if "-multiuser-server" in arguments and not known["multiuser"]:
        answer("unrecognized option -multiuser-server", 1)
    try:
        with open(os.path.join(pipe, "state.json"), encoding="utf-8") as f:
            if json.load(f)["alive"]:
                answer("An instance of this daemon is already running", 1)
    except FileNotFoundError:
        pass
    os.makedirs(pipe, exist_ok=True)
    state = {
        "alive": True,
        "protocol": protocol,
        "multiuser": "-m" in arguments or "-multiuser-server" in arguments,
        "devices": environment.get("CUDA_VISIBLE_DEVICES"),
        "servers": {},  # protocol 2: pid -> status; 3: name -> {status, namespaces}
        "clients": {},  # pid -> {server, namespace}
        "hang": [],  # commands that never return
        "refuse": [],  # commands that are answered with an error
        "calls": [],
    }
    save(pipe, state)
    open(os.path.join(pipe, "control"), "w").close()


def run(arguments, environment, lines, known):
    """(exit status, output). `known`: what the program can, see FakeMps. Raises HangError."""
    out = []
    try:
        obey(arguments, environment, lines, known, out)
    except Answer as e:
        return e.status, "\n".join([*out, e.text]).strip()
    return 0, "\n".join(out).strip()


def obey(arguments, environment, lines, known, out):
    pipe = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if "-d" in arguments:
        start(pipe, arguments, environment, known)
        return
    state = load(pipe)
    for command in [" ".join(arguments)] if arguments else lines.splitlines():
        state["calls"].append(command)
        save(pipe, state)
        if any(command.startswith(h) for h in state["hang"]):
            raise HangError(command)
        if any(command.startswith(r) for r in state["refuse"]):
            answer("the command failed")
        if state["protocol"] == 3:
            said = three(pipe, state, command.split())
        elif arguments:
            answer("usage: nvidia-cuda-mps-control [-d | -f]")
        else:
            said = two(pipe, state, command.split())
        save(pipe, state)
        if said:
            out.append(said)


def two(pipe, state, words):
    verb, rest = words[0], words[1:]
    if verb == "get_default_active_thread_percentage":
        return "100.0"
    if verb == "get_server_list":
        return "\n".join(state["servers"])
    if verb == "get_server_status":
        return state["servers"].get(rest[0], "no such server")
    if verb == "get_client_list":
        return "\n".join(pid for pid, c in state["clients"].items() if c["server"] == rest[0])
    if verb == "terminate_client":
        if state["clients"].get(rest[1], {}).get("server") != rest[0]:
            return "CUDA_ERROR_INVALID_VALUE"
        del state["clients"][rest[1]]
        return "0"
    if verb == "quit":
        return stop(pipe, state)
    return HELP


def three(pipe, state, words):
    if words == ["-q"]:
        return stop(pipe, state)
    plain = [w for w in words if not w.startswith("--")]
    options = dict(w[2:].partition("=")[::2] for w in words if w.startswith("--"))
    module, verb, rest = plain[0], plain[1], plain[2:]
    if (module, verb) == ("feature", "describe"):
        return "memacct,enabled (default),memacct,-\ncontext-share,enabled (default),context-share,-"
    if (module, verb) == ("server", "create"):
        state["servers"][rest[0]] = {
            "status": "Ready",
            "namespaces": {},
            "allowed": options["allowed-devices"],
        }
        return ""
    if (module, verb) == ("server", "list"):
        return "\n".join(
            f"{name},0,48201,{s['status']},{pipe}/{name},{s['allowed']},-"
            for name, s in state["servers"].items()
        )
    if module == "namespace":
        if options["server"] not in state["servers"]:
            answer(f"no server {options['server']}", 1)
        return namespace(pipe, state, options["server"], verb, rest, options)
    if (module, verb) == ("client", "list"):
        return "\n".join(f"{pid},{c['server']},0,{c['namespace']},app" for pid, c in state["clients"].items())
    if (module, verb) == ("client", "terminate"):
        if state["clients"].pop(rest[0], None) is None:
            answer(f"no client {rest[0]}", 1)
        return ""
    return answer(HELP, 1)


def namespace(pipe, state, server, verb, rest, options):
    there = state["servers"][server]["namespaces"]
    if verb == "list":
        return "\n".join(
            f"{name},{server},Ready,{n['pinned-memory-limit']},{n['active-thread-percentage']},0,"
            f"{pipe}/{server}/{name}"
            for name, n in there.items()
        )
    name = rest[0]
    if verb == "create":
        if name in there:
            answer(f"namespace {name} exists", 1)
        there[name] = {"pinned-memory-limit": "-", "active-thread-percentage": "100"}
        os.makedirs(os.path.join(pipe, server, name), exist_ok=True)
        open(os.path.join(pipe, server, name, "control"), "w").close()
        return ""
    if name not in there:
        answer(f"no namespace {name}", 1)
    if verb == "set":
        there[name].update({k: v for k, v in options.items() if k in there[name]})
    elif verb == "delete":
        if "force" not in options and any(c["namespace"] == name for c in state["clients"].values()):
            answer("active clients remain", 1)
        del there[name]
    return ""


def stop(pipe, state):
    state["alive"] = False
    os.unlink(os.path.join(pipe, "control"))
    return ""


def main():
    with open(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "mps-settings.json"), encoding="utf-8"
    ) as f:
        known = json.load(f)
    arguments = sys.argv[1:]
    try:
        status, out = run(arguments, os.environ, "" if arguments else sys.stdin.read(), known)
    except HangError:
        time.sleep(60)
        return 1
    print(out)
    return status


if __name__ == "__main__":
    sys.exit(main())
