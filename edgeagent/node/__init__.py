"""The host beside the GPUs: /proc and cgroups, CDI specs, K3s, the API server, clocks."""
