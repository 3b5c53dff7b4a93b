"""Data out of the service and back: backups of everything, and exports that others can read.

A backup knows no table by its columns: it goes by the MetaData, so that a table that is added to it
is backed up too.
"""
