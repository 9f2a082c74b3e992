"""Adapters to other packages. Nothing here imports the other package before it is used."""
