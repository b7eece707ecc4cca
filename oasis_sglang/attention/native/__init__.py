"""Compiled CPU code: `step.cpp`, built with the system's compiler at first use and kept in the user's cache.

build.py  compiles and loads the library
step.cpp  page selection, piece copies, gathering pages for attention
"""
