"""What fleet tests start from: node snapshots, and the shipped schemas made strict."""
