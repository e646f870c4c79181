"""What accelerate prepares, saves and resumes."""
