"""`python -m edgeagent`: the same as the `edgeagent` command."""

from edgeagent.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
