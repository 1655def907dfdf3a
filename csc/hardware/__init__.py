"""Profiles of devices, one TOML file each: see csc.analysis.hardware."""
