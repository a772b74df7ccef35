"""What a run is: frozen, closed sections, YAML in, key=value on top."""
