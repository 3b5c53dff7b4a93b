"""Backups of the whole service, exports for other programs, and imports.

A backup takes its tables from the MetaData, so that a new table is backed up too.
"""
