"""What a GPU is and how to read one. No Kubernetes here."""
