"""Fakes and a schedule explorer for tests of programs that use this package."""
