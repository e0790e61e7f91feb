"""Joining: bootstraps and exchanges, by which ranks find each other and become a group."""
