"""Making a share real, and saying how far each limit can be trusted."""
