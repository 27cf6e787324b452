"""Modules that the commands of this folder share."""
