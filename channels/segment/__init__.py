"""Memory that the ranks of a host share: each rank's announcements, errors and calls."""
