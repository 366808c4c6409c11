"""`edgeagent doctor`: is everything in place, from the driver to the broker, and if not, what next."""
