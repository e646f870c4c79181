"""Save training states, and restore them on any layout."""
