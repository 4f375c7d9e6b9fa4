"""Rows out to their experts and back: routes (who goes where), dispatch and combine."""
