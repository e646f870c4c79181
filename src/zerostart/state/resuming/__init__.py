"""Training states: saved while training goes on, and restored on any layout."""
