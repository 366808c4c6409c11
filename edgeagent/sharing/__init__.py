"""Pure decisions about shares: no I/O, no clock, no threads, no knowledge of device plugins."""
