"""Speaking to the kubelet: registration, device plugin servers, the checkpoint file, podresources."""
