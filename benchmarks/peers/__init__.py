"""The same work for us and for a peer, each in a process and a Python of its own; see side_by_side.py."""
