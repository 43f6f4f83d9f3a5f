"""Replicas on a mesh, replicas that come and go, their checkpoints."""
