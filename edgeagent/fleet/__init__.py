"""The MQTT uplink: topics, messages, outbox, commands."""
