"""The edgeagent command: one file per subcommand."""
