"""MacFleet's wire format: frames, heartbeat lines and payloads as bytes; no state."""
