"""Compiled CPU code, built with the system's compiler at first use and kept in the user's cache.

build.py    compiles and loads the library
step.cpp    page selection, piece copies, gathering pages for attention
linear.cpp  matrix products with the few rows of a decode step
"""
