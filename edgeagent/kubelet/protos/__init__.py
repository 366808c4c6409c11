"""The kubelet's protocols: message classes and full method names, one module a protocol."""
