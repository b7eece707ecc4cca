"""Compiled CPU code: `refresh.cpp`, built with the system's compiler at first use and kept in the user's cache.

build.py     compiles and loads the library
refresh.cpp  page selection and piece copies
"""
