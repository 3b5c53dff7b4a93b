"""Protocols, metrics, calibration and significance."""
