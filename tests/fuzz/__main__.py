"""`make fuzz`: coverage-guided fuzzing of each target in a process of its own (needs `.[fuzz]`: atheris).

    python -m tests.fuzz [--seconds N] [TARGET …]

Ends with 1 where a parser raised what it must not; the input is left in .cache/fuzz/TARGET.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "fuzz"


def one(name: str, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["edgeagent", "json"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = CACHE / name.replace(" ", "-")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=5",
        f"-artifact_prefix={corpus}/",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], str(corpus), *options, "-print_final_stats=1"], target.feed)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*")
    asked = parser.parse_args()
    if asked.one:
        one(asked.one, asked.seconds)
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError:
        print(
            "atheris is not installed: pip install -e '.[fuzz]' (Linux x86_64, Python 3.11 to 3.13)",
            file=sys.stderr,
        )
        return 2
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in asked.targets or TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", "--one", name, "--seconds", str(asked.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        executed = next(
            (li.split()[-1] for li in done.stderr.splitlines() if "number_of_executed_units" in li), "?"
        )
        print(f"{name:15} {executed:>10} inputs  {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stderr[-3000:], done.stdout[-3000:])
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
