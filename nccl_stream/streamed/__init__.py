"""Samples that travel in pieces while they are produced."""
