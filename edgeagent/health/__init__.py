"""From readings and events to conditions, and from conditions to withdrawn shares and alerts."""
